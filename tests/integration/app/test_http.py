"""The real server over HTTP: shapes, order, limits, hostile input, clients that leave."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from integration.app.running import events

FRIDAY = "How late can I come by on a Friday evening?"
# At this temperature a small model writes noise and practically never ends by itself: if nothing
# stops it, it goes on for minutes.
ENDLESS = {"question": FRIDAY, "top_k": 1, "max_tokens": 4000, "temperature": 2}
SOON = 20  # seconds, far less than that

SOURCE_KEYS = {"conversation_id", "found", "quotes", "citations"}
ANSWER_KEYS = SOURCE_KEYS | {"answer", "engine", "timings"}
CITATION_KEYS = {"n", "file", "page", "heading", "passage", "score"}
ENGINE_KEYS = {
    "target",
    "draft",
    "drafter",
    "tokens",
    "tokens_per_second",
    "tokens_per_round",
    "rounds",
    "kept",
    "reused",
}


def stream(server, **body):
    with server.client.stream("POST", "/ask/stream", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message"}
    return body["error"]["message"]


def test_the_answer_to_ask_has_the_promised_shape(server):
    answer = server.ask(FRIDAY, top_k=3, max_tokens=12)
    assert set(answer) == ANSWER_KEYS
    assert answer["found"] is True
    assert isinstance(answer["answer"], str)
    assert [set(citation) for citation in answer["citations"]] == [CITATION_KEYS] * 3
    assert answer["quotes"] == [
        {
            "n": 1,
            "sentence": "On Friday the shop is open from 11:00 to 21:00.",
            "file": "samples/hours-and-returns.pdf",
            "page": 1,
        }
    ]
    engine = answer["engine"]
    assert set(engine) == ENGINE_KEYS
    assert (engine["target"], engine["draft"], engine["drafter"]) == (
        "smollm2-135m",
        "smollm2-135m-dflash",
        "composed",
    )
    assert 1 <= engine["tokens"] <= 12
    assert engine["rounds"] >= 1
    assert engine["tokens_per_round"] >= 1
    assert engine["tokens_per_second"] > 0
    assert set(answer["timings"]) == {"retrieve_ms", "prefill_ms", "decode_ms"}
    assert min(answer["timings"].values()) > 0


def test_what_is_not_in_the_documents_is_answered_without_an_engine(server):
    answer = server.ask("Which country won the football World Cup in 1998?")
    assert set(answer) == ANSWER_KEYS
    assert answer["found"] is False
    assert answer["engine"] is None
    assert answer["citations"] == answer["quotes"] == []
    assert "could not find" in answer["answer"]
    assert (answer["timings"]["prefill_ms"], answer["timings"]["decode_ms"]) == (0, 0)


def test_a_chinese_question_is_answered_from_the_chinese_document(server):
    answer = server.ask("停車費可以折抵嗎？", max_tokens=1)
    assert answer["citations"][0]["file"] == "samples/shop-guide-zh.pdf"
    assert answer["quotes"][0]["sentence"] == "消費滿 1,500 元可折抵一小時停車費。"


def test_a_stream_brings_sources_then_tokens_as_they_are_written_then_the_whole(server):
    got = stream(server, question=FRIDAY, top_k=1, max_tokens=40, temperature=2)
    names = [name for _, name, _ in got]
    assert names[0] == "sources"
    assert names[-1] == "done"
    assert set(names[1:-1]) == {"token"}
    assert len(names) > 10
    sources, done = got[0][2], got[-1][2]
    assert set(sources) == SOURCE_KEYS
    assert set(done) == ANSWER_KEYS
    assert {key: done[key] for key in SOURCE_KEYS} == sources
    assert all(set(data) == {"text"} for _, name, data in got if name == "token")
    written = "".join(data["text"] for _, name, data in got if name == "token")
    assert written.strip() == done["answer"]
    # The first token is there long before the last, by about the time that writing took.
    times = [time for time, _, _ in got]
    took = done["timings"]["decode_ms"] / 1000
    assert times[-1] - times[1] > 0.5 * took > 0


def test_a_stream_says_what_is_not_found(server):
    got = stream(server, question="Which country won the football World Cup in 1998?")
    assert [name for _, name, _ in got] == ["sources", "token", "done"]
    assert got[1][2]["text"] == got[2][2]["answer"]


def test_a_stream_and_a_plain_answer_say_the_same(server):
    plain = server.ask(FRIDAY, max_tokens=8)
    streamed = stream(server, question=FRIDAY, top_k=1, max_tokens=8)[-1][2]
    for answer in (plain, streamed):
        for changing in ("conversation_id", "timings"):
            del answer[changing]
        # How fast it was; the second time, much is known from the first.
        engine = answer["engine"]
        answer["engine"] = {name: engine[name] for name in ("target", "draft", "drafter", "tokens")}
    assert plain == streamed


def test_a_question_asked_again_is_read_and_written_sooner(server):
    question = "What must I do before I clean the burrs of the grinder?"
    first, again = (server.ask(question, max_tokens=30) for _ in range(2))
    assert again["answer"] == first["answer"]
    assert again["engine"]["reused"] > 100
    assert again["engine"]["kept"]["memory"] > 0.5 * again["engine"]["tokens"]
    assert again["engine"]["rounds"] < first["engine"]["rounds"]


@pytest.mark.parametrize("wanted", [1, 7])
def test_max_tokens_is_exact(server, wanted):
    assert server.ask(FRIDAY, max_tokens=wanted, temperature=2)["engine"]["tokens"] == wanted


def test_temperature_makes_answers_differ(server):
    answers = {server.ask(FRIDAY, max_tokens=10, temperature=2)["answer"] for _ in range(2)}
    assert len(answers) == 2


def test_a_conversation_goes_on(server):
    before = server.ask(FRIDAY)
    after = server.ask("And on Saturday?", conversation_id=before["conversation_id"])
    assert after["conversation_id"] == before["conversation_id"]
    assert after["quotes"][0]["sentence"] == "On Saturday the shop is open from 10:00 to 20:00."


EXAMPLE = 'send a JSON object such as {"question": "When do you open?"}'


@pytest.mark.parametrize("path", ["/ask", "/ask/stream"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", EXAMPLE),
        ("[]", EXAMPLE),
        ("null", EXAMPLE),
        ('"When?"', EXAMPLE),
        ("{}", "'question' is missing"),
        ("{bad", "the body is not valid JSON"),
        ('{"question": ""}', "'question' is empty"),
        ('{"question": " \\n\\t\\u3000"}', "'question' is empty"),
        ('{"question": 5}', "'question': input should be a valid string"),
        ('{"question": null}', "'question': input should be a valid string"),
        ('{"question": "\\ud800"}', "'question': input should be a valid string"),
        (json.dumps({"question": "a" * 2001}), "the question is longer than 2000 characters"),
        (json.dumps({"question": "🙂" * 80_000}), "the question is longer than 2000 characters"),
        ('{"question": "a", "top_k": 0}', "'top_k': input should be greater than or equal to 1"),
        ('{"question": "a", "top_k": 11}', "'top_k': input should be less than or equal to 10"),
        ('{"question": "a", "top_k": 1.5}', "'top_k': input should be a valid integer"),
        ('{"question": "a", "max_tokens": 0}', "'max_tokens': input should be greater than"),
        ('{"question": "a", "max_tokens": 4097}', "'max_tokens': input should be less than"),
        ('{"question": "a", "temperature": -1}', "'temperature': input should be greater than"),
        ('{"question": "a", "temperature": NaN}', "'temperature': input should be"),
        ('{"question": "a", "conversation_id": "%s"}' % ("c" * 65), "'conversation_id': string"),
    ],
)
def test_bad_input_is_refused_in_words_that_people_understand(server, path, body, message):
    headers = {"Content-Type": "application/json"}
    response = server.client.post(path, content=body, headers=headers)
    assert refusal(response, 422).startswith(message)


def test_everything_that_is_wrong_is_told_at_once(server):
    response = server.client.post("/ask", json={"top_k": 0, "temperature": 9})
    message = refusal(response, 422)
    assert message.count(";") == 2
    assert all(f"'{name}'" in message for name in ("question", "top_k", "temperature"))


def test_what_another_site_can_send_without_being_asked_is_refused(server):
    # A form or a plain fetch() of any web page can post text/plain to the loopback.
    response = server.client.post(
        "/ask", content=json.dumps({"question": FRIDAY}), headers={"Content-Type": "text/plain"}
    )
    assert refusal(response, 422) == EXAMPLE
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"question": "caf\xe9"}'])
def test_json_nested_without_end_and_bytes_that_are_no_text_are_refused(server, body):
    headers = {"Content-Type": "application/json"}
    refusal(server.client.post("/ask", content=body, headers=headers), 400)


@pytest.mark.parametrize("path", ["/ask", "/ask/stream", "/documents/ingest"])
def test_a_huge_body_is_refused(server, path):
    def body():
        yield b'{"question": "When do you open?", "more": "'
        for _ in range(40):
            yield b"x" * 100_000
        yield b'"}'

    headers = {"Content-Type": "application/json"}
    response = server.client.post(path, content=body(), headers=headers)
    assert refusal(response, 413) == "the body is larger than 1000 kB"


@pytest.mark.parametrize("name", ["**bold**", "<script>alert(1)</script>", 'x" OR NEAR(* NOT'])
def test_markup_and_operators_in_a_question_are_only_text(server, name):
    answer = server.ask(f"{name} When is the shop open on Friday?")
    assert answer["quotes"][0]["sentence"] == "On Friday the shop is open from 11:00 to 21:00."


def test_control_characters_and_spaces_around_a_question_do_no_harm(server):
    answer = server.ask(f"  \x00{FRIDAY}\u202e\x1b \n")
    assert answer["quotes"][0]["page"] == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/", 405),
        ("GET", "/ask", 405),
        ("DELETE", "/health", 405),
        ("GET", "/documents/ingest", 405),
    ],
)
def test_what_is_not_there_is_refused_in_json(server, method, path, status):
    assert refusal(server.client.request(method, path), status)


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py"]
)
def test_nothing_beside_the_static_folder_is_served(server, path):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"create_app" not in answer


def test_the_page_allows_nothing_from_elsewhere(server):
    page = server.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    for asset in ("chat.js", "chat.css"):
        assert f"/static/{asset}" in page.text
        assert server.client.get(f"/static/{asset}").status_code == 200
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text


def test_health_says_what_is_served(server):
    health = server.client.get("/health").json()
    assert health == {
        "status": "ready",
        "name": "dflash-rag",
        "target": "smollm2-135m",
        "stand_in": True,
        "documents": 4,
        "passages": 47,
        "problem": "",
    }


def test_a_client_that_leaves_a_stream_stops_the_model(server):
    with server.client.stream("POST", "/ask/stream", json=ENDLESS) as response:
        seen = 0
        for line in response.iter_lines():
            seen += line == "event: token"
            if seen == 3:
                break
    start = time.monotonic()
    server.ask(FRIDAY, max_tokens=1)
    assert time.monotonic() - start < SOON


def test_a_client_that_leaves_a_plain_question_stops_the_model(server):
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/ask", json=ENDLESS, timeout=httpx.Timeout(10, read=4))
    start = time.monotonic()
    server.ask(FRIDAY, max_tokens=1)
    assert time.monotonic() - start < SOON


def test_a_client_that_never_reads_does_not_hold_others_up_and_can_go(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS | {"max_tokens": 15})
    with socket.create_connection((host, int(port)), timeout=10) as deaf:
        deaf.sendall(
            f"POST /ask/stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert server.client.get("/health", timeout=10).status_code == 200
        assert server.ask(FRIDAY, max_tokens=1)["found"]


def test_idle_and_half_sent_requests_do_not_hold_others_up(server):
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
    try:
        for number, connection in enumerate(idle):
            if number % 2:
                connection.sendall(b"POST /ask HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert server.client.get("/health", timeout=10).status_code == 200
        assert server.ask(FRIDAY, max_tokens=1)["found"]
    finally:
        for connection in idle:
            connection.close()


def test_eight_at_once_all_get_their_own_answer(server, questions):
    asked = [question for question in questions if question["file"]]
    asked = (asked * 2)[:8]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda q: server.ask(q["question"], max_tokens=1), asked))
    for question, answer in zip(asked, answers, strict=True):
        first = answer["citations"][0]
        assert (first["file"], first["page"]) == (question["file"], question["page"])
    assert len({answer["conversation_id"] for answer in answers}) == 8


def test_more_than_may_wait_are_sent_away_and_the_others_answered(server):
    body = {"question": FRIDAY, "top_k": 1, "max_tokens": 1}
    with (
        ThreadPoolExecutor(12) as pool,
        server.client.stream("POST", "/ask/stream", json=ENDLESS) as endless,
    ):
        lines = endless.iter_lines()
        next(line for line in lines if line == "event: token")  # the model is busy with this one
        asked = [pool.submit(server.client.post, "/ask", json=body) for _ in range(11)]
        end = time.monotonic() + 30
        while sum(future.done() for future in asked) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        refused = [future.result() for future in asked if future.done()]
        streamed = stream(server, **body)
        endless.close()
        answered = [future.result() for future in asked if future.result() not in refused]
    assert len(refused) == 3
    for response in refused:
        assert "try again" in refusal(response, 503)
        assert int(response.headers["retry-after"]) >= 1
    assert [name for _, name, _ in streamed] == ["sources", "error"]
    assert "try again" in streamed[-1][2]["message"]
    assert [response.status_code for response in answered] == [200] * 8
