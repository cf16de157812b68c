import csv
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_engine import hub
from dflash_engine.bench.prompts import KINDS, PROMPTS, Prompt, load

HAN = re.compile(r"[\u4e00-\u9fff]")
CATEGORIES = [prompt.name for prompt in load(["again"])]
WORDINGS = [
    row
    for category in CATEGORIES
    for row in (
        (f"Hello, a word about {category}?", category),
        (f"Hello,  a word\nabout {category}?", category),  # the same but for white space
        (f"What should I know of {category}, please?", category),
        (f"And a third thing about {category}?", category),
    )
]


def write(path: Path, rows: list[tuple[str, str]], header: tuple[str, ...] = ("text", "category")):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def conversations(prompt: Prompt) -> list[list[dict[str, str]]]:
    return [prompt.messages] + ([prompt.earlier] if prompt.earlier else [])


def split(messages: list[dict[str, str]]) -> tuple[str, str]:
    passages, question = messages[1]["content"].rsplit("\n\n", 1)
    return passages, question


def test_every_kind_has_ten_prompts_and_no_two_are_alike() -> None:
    prompts = load()
    assert [prompt.kind for prompt in prompts] == [kind for kind in KINDS for _ in range(10)]
    assert len({(prompt.kind, prompt.name) for prompt in prompts}) == 50
    asked = [messages[1]["content"] for prompt in prompts for messages in conversations(prompt)]
    assert len(set(asked)) == len(asked) == 60


def test_a_conversation_is_the_instructions_and_then_what_is_asked() -> None:
    for prompt in load():
        for messages in conversations(prompt):
            assert [message["role"] for message in messages] == ["system", "user"]
            assert all(message["content"].strip() for message in messages)


def test_questions_over_passages_come_after_three_of_them() -> None:
    for prompt in load(["passages", "again"]):
        for messages in conversations(prompt):
            passages, question = split(messages)
            assert passages.startswith("Passages:\n")
            assert question.startswith("Question: ")
            lengths = [len(passage.split()) for passage in passages.split("\n", 1)[1].split("\n\n")]
            assert len(lengths) == 3
            assert all(60 <= length <= 110 for length in lengths), prompt.name


def test_a_prompt_tells_the_passages_that_its_messages_have() -> None:
    for prompt in load():
        assert bool(prompt.passages) == (prompt.kind not in ("chat", "code"))
        for messages in conversations(prompt):
            assert "\n\n".join(prompt.passages) in messages[1]["content"]


def test_only_again_was_asked_before_over_the_same_passages_in_other_words() -> None:
    for prompt in load():
        assert (prompt.earlier is not None) == (prompt.kind == "again")
        if prompt.earlier is not None:
            before, first = split(prompt.earlier)
            now, second = split(prompt.messages)
            assert before == now
            assert first != second
            assert prompt.earlier[0] == prompt.messages[0]


def test_chinese_prompts_are_chinese_throughout() -> None:
    for prompt in load(["chinese"]):
        assert HAN.search(prompt.name)
        for message in prompt.messages:
            assert HAN.search(message["content"])
            assert not re.search("[A-Za-z]", message["content"])
            # Characters that only simplified Chinese has.
            assert not re.search("[这们个时间问题应该实还没货单费]", message["content"])


def test_fewer_kinds_and_prompts_are_the_first_of_all() -> None:
    everything = load()
    some = load(["chat", "passages"], count=2)
    assert [prompt.kind for prompt in some] == ["passages", "passages", "chat", "chat"]
    assert some == [*everything[:2], *everything[20:22]]


def test_wordings_of_a_file_are_asked_over_our_passages(tmp_path: Path) -> None:
    prompts = load(["again"], wordings=write(tmp_path / "wordings.csv", WORDINGS))
    for prompt, ours in zip(prompts, load(["again"]), strict=True):
        assert prompt.earlier is not None
        passages = split(ours.messages)[0]
        earlier = f"Question: Hello, a word about {prompt.name}?"
        later = f"Question: What should I know of {prompt.name}, please?"
        assert split(prompt.earlier) == (passages, earlier)
        assert split(prompt.messages) == (passages, later)


def test_wordings_leave_the_other_kinds_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "wordings.csv", WORDINGS)
    others = [prompt for prompt in load(wordings=path) if prompt.kind != "again"]
    assert others == [prompt for prompt in load() if prompt.kind != "again"]


def test_wordings_are_needed_for_the_prompts_asked_for_only(tmp_path: Path) -> None:
    path = write(tmp_path / "wordings.csv", WORDINGS[:8])
    assert [prompt.name for prompt in load(["again"], 2, path)] == CATEGORIES[:2]
    with pytest.raises(ValueError, match=f"two different texts.*{CATEGORIES[2]}"):
        load(["again"], 3, path)


def test_a_text_that_comes_twice_is_one_wording(tmp_path: Path) -> None:
    path = write(tmp_path / "wordings.csv", WORDINGS[:2])
    with pytest.raises(ValueError, match=f"two different texts.*{CATEGORIES[0]}"):
        load(["again"], 1, path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_a_file_that_a_spreadsheet_saved_is_read(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "wordings.csv"
    rows = f"text,category,more\r\nCafé?,{CATEGORIES[0]},1\r\nTea?,{CATEGORIES[0]},\r\nshort\r\n"
    path.write_bytes(mark + rows.encode())
    prompt = load(["again"], 1, path)[0]
    assert prompt.earlier is not None
    assert split(prompt.earlier)[1] == "Question: Café?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the wordings.*No such file"),
        (b"", "no column category and no column text"),
        (b"text;category\na;b\n", "no column category and no column text"),
        (b"text,intent\na,b\n", "no column category:"),
        ("text,category\nCafé?,age_limit\n".encode("latin-1"), "not in UTF-8"),
        ("text,category\nTea?,age_limit\n".encode("utf-16"), "not in UTF-8"),
        (b'text,category\n"Tea?,age_limit\n', "not a CSV file"),
    ],
    ids=["missing", "empty", "semicolons", "no category", "latin-1", "utf-16", "open quote"],
)
def test_a_file_that_is_no_such_table_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "wordings.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(["again"], wordings=path)
    assert str(path) in str(error.value)


def test_a_folder_is_no_file_of_wordings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the wordings"):
        load(wordings=tmp_path)


def test_wordings_that_nobody_would_ask_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ask for that kind as well"):
        load(["chat"], wordings=write(tmp_path / "wordings.csv", WORDINGS))


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'poems': choose from passages, again, chat"):
        load(["chat", "poems"])


@pytest.mark.parametrize("count", [-1, 0, PROMPTS + 1])
def test_a_count_that_the_kinds_do_not_have_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="ask for 1 to 10"):
        load(count=count)


def test_prompts_leave_a_small_model_room_to_answer(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hub.resolve("smollm2-135m", models))
    lengths = {}
    for prompt in load():
        for messages in conversations(prompt):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            tokens = tokenizer.encode(text, add_special_tokens=False)
            lengths[prompt.kind, messages[1]["content"]] = len(tokens)
    assert max(lengths.values()) < 1200
    over_passages = [n for (kind, _), n in lengths.items() if kind in ("passages", "again")]
    assert min(over_passages) > 300
    assert max(over_passages) < 600
