// The chat page: one question at a time to POST /ask/stream, its answer shown as it arrives.
// Whatever a document, a person or the model wrote reaches the page through `textContent` alone.

const LIMIT = 2000;
const NEAR_LIMIT = 1800;

const STRINGS = {
  en: {
    skip: "Skip to the question",
    new: "New conversation",
    welcome: "What would you like to know?",
    welcomeHow:
      "You get the sentence that answers you, with its file and page. A model's own words follow below it.",
    conversation: "Conversation",
    question: "Your question",
    placeholder: "Ask about the documents",
    send: "Send",
    stop: "Stop",
    keys: "Enter sends. Shift+Enter starts a new line.",
    left: (n) => `${n} ${n === 1 ? "character" : "characters"} left`,
    over: (n) => `Too long by ${n} ${n === 1 ? "character" : "characters"}. Please shorten your question.`,
    loading: "Loading the model…",
    away: "No connection. Trying again…",
    ready: (n) => (n === 1 ? "1 document" : `${n} documents`),
    standIn: (model) =>
      `Answers here are written by a small stand-in model (${model}). A Mac runs far larger ones. ` +
      "The quotes come straight from the documents: they are what to trust.",
    noDocuments: ["There are no documents yet. Add PDFs to ", "data/", " and run ", "dflash-rag ingest", "."],
    searching: "Looking through the documents…",
    writing: "Writing…",
    you: "You asked:",
    quotes: "From the documents",
    written: (model) => `Written by the model (${model})`,
    writtenPlain: "Written by the model",
    writtenStandIn: (model) => `Written by the model (${model}, a small stand-in). Trust the quotes.`,
    sources: "Sources",
    page: (n) => `p. ${n}`,
    score: (n) => `Match ${n}`,
    speed: (n) => `${n} tok/s`,
    perRound: (n) => `${n} tokens/round`,
    retrieval: (time) => `retrieval ${time}`,
    firstToken: (time) => `first token ${time}`,
    seconds: (n) => `${n} s`,
    milliseconds: (n) => `${n} ms`,
    stopped: "Stopped.",
    retry: "Retry",
    broken: "The connection ended before the answer was complete.",
    failed: (status) => `The server answered with an error (${status}).`,
    done: (text) => `Answer: ${text}`,
  },
  "zh-Hant": {
    skip: "跳到問題欄",
    new: "新的對話",
    welcome: "想知道什麼呢？",
    welcomeHow: "先給您文件裡的原句，附上檔名和頁數；下面才是模型自己的說法。",
    conversation: "對話",
    question: "您的問題",
    placeholder: "詢問文件內容",
    send: "送出",
    stop: "停止",
    keys: "按 Enter 送出，Shift+Enter 換行。",
    left: (n) => `還可以輸入 ${n} 個字`,
    over: (n) => `超過 ${n} 個字，請縮短問題。`,
    loading: "正在載入模型…",
    away: "連線中斷，正在重試…",
    ready: (n) => `${n} 份文件`,
    standIn: (model) =>
      `這裡的回答由小型替代模型（${model}）撰寫，Mac 上可以執行大得多的模型。` +
      "引文直接取自文件，請以引文為準。",
    noDocuments: ["目前沒有文件。請把 PDF 放進 ", "data/", "，然後執行 ", "dflash-rag ingest", "。"],
    searching: "正在查閱文件…",
    writing: "正在撰寫…",
    you: "您的問題：",
    quotes: "文件原文",
    written: (model) => `由模型撰寫（${model}）`,
    writtenPlain: "由模型撰寫",
    writtenStandIn: (model) => `由模型撰寫（小型替代模型 ${model}），請以引文為準。`,
    sources: "出處",
    page: (n) => `第 ${n} 頁`,
    score: (n) => `相符程度 ${n}`,
    speed: (n) => `每秒 ${n} 詞元`,
    perRound: (n) => `每輪 ${n} 詞元`,
    retrieval: (time) => `檢索 ${time}`,
    firstToken: (time) => `首個詞元 ${time}`,
    seconds: (n) => `${n} 秒`,
    milliseconds: (n) => `${n} 毫秒`,
    stopped: "已停止。",
    retry: "重試",
    broken: "回答尚未完成，連線就中斷了。",
    failed: (status) => `伺服器發生錯誤（${status}）。`,
    done: (text) => `回答：${text}`,
  },
};

const LANGUAGE = /^zh\b/i.test(navigator.language) ? "zh-Hant" : "en";
const say = STRINGS[LANGUAGE];
const MODEL_NAMES = { "smollm2-135m": "SmolLM2-135M" };

const at = (id) => document.getElementById(id);
const form = at("ask");
const field = at("question");

/** The one piece of state: what the server said of itself, and the question under way. */
const page = {
  health: null, // the last answer of GET /health, null until it is ready
  conversation: null, // conversation_id, null before the first answer
  running: null, // the AbortController of the question under way
};

/** An element with a class and a text, the text never read as markup. */
function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** "mlx-community/Qwen3-4B-4bit" -> "Qwen3-4B-4bit"; known ids get their proper spelling. */
function modelName(id) {
  const last = String(id ?? "").split("/").pop();
  return MODEL_NAMES[last.toLowerCase()] ?? last;
}

function number(value, digits) {
  return new Intl.NumberFormat(LANGUAGE, { maximumFractionDigits: digits }).format(value);
}

/** 412 -> "412 ms", 1530 -> "1.5 s". */
function duration(ms) {
  return ms < 1000 ? say.milliseconds(number(ms, 0)) : say.seconds(number(ms / 1000, 1));
}

function place(file, pageNumber) {
  const name = String(file ?? "").split("/").pop();
  return pageNumber == null ? name : `${name} · ${say.page(pageNumber)}`;
}

// --- Server-sent events -------------------------------------------------------------------

/**
 * Events of one `text/event-stream` body, as {event, data}.
 *
 * EventSource cannot POST, so the lines are read here (HTML standard, "Server-sent events"):
 * CRLF, LF or CR ends a line, also where a chunk ends in the middle; ":" starts a comment;
 * several data lines are one text.
 */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += value ?? "";
      // A CR that ends a chunk may be half a CRLF; one that ends the body is not.
      const lineEnd = done ? /\r\n|\n|\r/ : /\r\n|\n|\r(?!$)/;
      for (;;) {
        const end = lineEnd.exec(rest);
        if (!end) break;
        const line = rest.slice(0, end.index);
        rest = rest.slice(end.index + end[0].length);
        if (line === "") {
          if (data.length) yield { event: name || "message", data: data.join("\n") };
          name = "";
          data = [];
          continue;
        }
        const [, key, text] = /^([^:]*):? ?([^]*)$/.exec(line);
        if (key === "event") name = text;
        if (key === "data") data.push(text);
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // the body may be aborted already
  }
}

// --- One reply ----------------------------------------------------------------------------

/** What stands under a question: quotes, the model's words, sources, facts; or an error. */
class Reply {
  constructor(box) {
    this.box = box;
    this.found = true;
    this.written = null;
    this.begin();
  }

  begin() {
    this.found = true;
    this.written = null;
    this.started = performance.now();
    this.firstToken = null;
    this.box.replaceChildren(make("p", "waiting", say.searching));
    this.box.setAttribute("aria-busy", "true");
  }

  /** Quotes at once; the citations wait for the answer, under which they stand. */
  sources({ found, quotes }) {
    this.found = found;
    this.box.replaceChildren();
    this.quote(found ? quotes : []);
    this.box.append(make("p", "waiting", found ? say.writing : say.searching));
  }

  token({ text }) {
    if (!text) return;
    this.firstToken ??= performance.now() - this.started;
    this.words().textContent += text;
  }

  /** The whole answer: it stands even where what was streamed differs. */
  done(answer) {
    this.found = answer.found;
    this.quote(answer.found ? answer.quotes : []);
    if (answer.answer) this.words().textContent = answer.answer;
    else this.written?.remove();
    this.settle();
    const kicker = this.written?.querySelector(".kicker");
    if (kicker && answer.engine) kicker.textContent = this.label(answer.engine.target);
    else kicker?.remove(); // no engine ran: not the model's words
    if (answer.found) this.cite(answer.citations);
    if (answer.engine) this.facts(answer.engine, answer.timings);
  }

  stopped() {
    this.settle();
    this.box.append(make("p", "note", say.stopped));
  }

  failed(message, retry) {
    this.settle();
    const bubble = make("div", "error");
    bubble.setAttribute("role", "alert");
    const button = make("button", "quiet", say.retry);
    button.type = "button";
    button.addEventListener("click", retry);
    bubble.append(make("p", "", message), button);
    this.box.append(bubble);
  }

  settle() {
    this.box.removeAttribute("aria-busy");
    this.box.querySelector(".waiting")?.remove();
    this.written?.classList.remove("streaming");
  }

  words() {
    if (!this.written) {
      this.box.querySelector(".waiting")?.remove();
      this.written = make("section", "written streaming");
      if (this.found) this.written.append(make("h3", "kicker", this.label(page.health?.target)));
      const words = make("p", "words");
      words.dir = "auto";
      this.written.append(words);
      this.box.append(this.written);
    }
    return this.written.querySelector(".words");
  }

  label(target) {
    if (!target) return say.writtenPlain;
    return (page.health?.stand_in ? say.writtenStandIn : say.written)(modelName(target));
  }

  quote(quotes) {
    this.box.querySelector(".quotes")?.remove();
    if (!quotes?.length) return;
    const section = make("section", "quotes");
    section.append(make("h3", "kicker", say.quotes));
    for (const { sentence, file, page: pageNumber } of quotes) {
      const figure = make("figure", "quote");
      const words = make("blockquote", "", sentence);
      words.dir = "auto";
      figure.append(words, make("figcaption", "", place(file, pageNumber)));
      section.append(figure);
    }
    this.box.prepend(section);
  }

  cite(citations) {
    if (!citations?.length) return;
    const section = make("section", "sources");
    const chips = make("div", "chips");
    for (const citation of citations) {
      const chip = make("details", "chip");
      const summary = make("summary");
      summary.append(
        make("b", "", String(citation.n ?? "")),
        make("span", "", place(citation.file, citation.page)),
      );
      const passage = make("div", "passage");
      passage.dir = "auto";
      if (citation.heading) passage.append(make("h4", "", citation.heading));
      passage.append(make("p", "", citation.passage));
      if (typeof citation.score === "number")
        passage.append(make("p", "score", say.score(number(citation.score, 2))));
      chip.append(summary, passage);
      chips.append(chip);
    }
    section.append(make("h3", "kicker", say.sources), chips);
    this.box.append(section);
  }

  facts(engine, timings) {
    const known = (value) => typeof value === "number" && Number.isFinite(value);
    const facts = [modelName(engine.target), engine.drafter ?? modelName(engine.draft)];
    if (known(engine.tokens_per_second)) facts.push(say.speed(number(engine.tokens_per_second, 1)));
    if (known(engine.tokens_per_round)) facts.push(say.perRound(number(engine.tokens_per_round, 1)));
    if (known(timings?.retrieve_ms)) facts.push(say.retrieval(duration(timings.retrieve_ms)));
    if (known(this.firstToken)) facts.push(say.firstToken(duration(this.firstToken)));
    this.box.append(make("p", "facts", facts.filter(Boolean).join(" · ")));
  }
}

// --- Asking -------------------------------------------------------------------------------

/** The message of an error response: {"error": {"message"}}, or one that names the status. */
async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message;
  return typeof message === "string" && message ? message : say.failed(response.status);
}

/** Ask `question` and fill `reply`; runs to the end, the reader's stop, or an error. */
async function ask(question, reply) {
  const running = new AbortController();
  page.running = running;
  reply.begin();
  announce(say.searching);
  showControls();
  const fail = (message) => reply.failed(message, () => page.running || ask(question, reply));
  try {
    const response = await fetch("/ask/stream", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify(
        page.conversation ? { question, conversation_id: page.conversation } : { question },
      ),
      signal: running.signal,
    });
    if (!response.ok) {
      if (response.status === 503) watchHealth();
      return fail(await errorOf(response));
    }
    for await (const { event, data } of events(response.body)) {
      const value = JSON.parse(data);
      // A chunk read before the stop must not write into a page that has moved on.
      if (running.signal.aborted) break;
      const follow = isAtEnd();
      if (event === "sources") reply.sources(value);
      else if (event === "token") reply.token(value);
      else if (event === "done") reply.done(value);
      else if (event === "error") fail(value.message || say.broken);
      if (value.conversation_id) page.conversation = value.conversation_id;
      if (follow) toEnd();
      if (event === "done") return announce(say.done(value.answer));
      if (event === "error") return;
    }
    if (running.signal.aborted) reply.stopped();
    else fail(say.broken);
  } catch (error) {
    if (running.signal.aborted) reply.stopped();
    else {
      if (error instanceof TypeError) watchHealth(); // how fetch says the server is gone
      else console.warn(error);
      fail(say.broken);
    }
  } finally {
    if (page.running === running) page.running = null;
    showControls();
  }
}

function addTurn(question) {
  at("welcome").hidden = true;
  const turn = make("li", "turn");
  const asked = make("p", "asked");
  asked.dir = "auto";
  asked.append(make("span", "unseen", `${say.you} `), make("span", "", question));
  const box = make("div", "reply");
  turn.append(asked, box);
  at("conversation").append(turn);
  return new Reply(box);
}

function isAtEnd() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  return scrollHeight - clientHeight - scrollTop < 80;
}

/** Scroll to the end, but never past the top of the last turn: its quotes stay in view. */
function toEnd() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  const turn = at("conversation").lastElementChild?.getBoundingClientRect().top ?? 0;
  const header = document.querySelector(".top").offsetHeight;
  window.scrollTo(0, Math.min(scrollHeight - clientHeight, scrollTop + turn - header - 12));
}

function announce(text) {
  at("status").textContent = text;
}

// --- The question field -------------------------------------------------------------------

/** Length as the server counts it: characters, not UTF-16 halves. */
function questionLength() {
  return [...field.value.trim()].length;
}

function showControls() {
  const length = questionLength();
  const focused = document.activeElement;
  const busy = page.running !== null;
  at("stop").hidden = !busy;
  at("send").hidden = busy;
  at("send").disabled = page.health === null || length === 0 || length > LIMIT;
  if (focused === at("stop") && !busy) field.focus();
  const count = at("count");
  count.classList.toggle("over", length > LIMIT);
  field.setAttribute("aria-invalid", String(length > LIMIT));
  if (length > LIMIT) count.textContent = say.over(length - LIMIT);
  else count.textContent = length > NEAR_LIMIT ? say.left(LIMIT - length) : "";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (page.running || at("send").disabled) return;
  const question = field.value.trim();
  field.value = "";
  ask(question, addTurn(question));
  toEnd();
  field.focus();
});

field.addEventListener("keydown", (event) => {
  // Enter that confirms a candidate of an input method is not Enter. Safari reports it with
  // isComposing false and keyCode 229.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  form.requestSubmit();
});

field.addEventListener("input", showControls);
at("stop").addEventListener("click", () => page.running?.abort());

at("new").addEventListener("click", () => {
  page.running?.abort();
  page.running = null;
  page.conversation = null;
  at("conversation").replaceChildren();
  at("welcome").hidden = false;
  announce(say.new);
  showControls();
  field.focus();
});

// --- The server's state -------------------------------------------------------------------

function showHealth(health, reachable) {
  const ready = health?.status === "ready";
  page.health = ready ? health : null;
  if (health?.name) document.title = at("name").textContent = health.name;
  const state = at("state");
  const text = ready ? say.ready(health.documents) : reachable ? say.loading : say.away;
  state.dataset.state = ready ? "ready" : reachable ? "loading" : "away";
  if (state.textContent !== text) {
    state.textContent = text;
    if (!ready) announce(text);
  }
  const notices = [];
  if (ready && health.documents === 0) {
    const [start, folder, middle, command, end] = say.noDocuments;
    const notice = make("p", "notice");
    notice.append(start, make("code", "", folder), middle, make("code", "", command), end);
    notices.push(notice);
  }
  if (ready && health.stand_in)
    notices.push(make("p", "notice", say.standIn(modelName(health.target))));
  at("notices").replaceChildren(...notices);
  showControls();
}

let nextLook; // the timer of the next look, so that there is one watch at a time

/** Ask each second until the model is loaded, then now and then while there are no documents. */
async function watchHealth() {
  clearTimeout(nextLook);
  let wait = 1000;
  try {
    const response = await fetch("/health", { cache: "no-store" });
    const health = await response.json().catch(() => null);
    showHealth(response.ok ? health : { ...health, status: "loading" }, true);
    if (page.health) wait = page.health.documents === 0 ? 5000 : 0;
  } catch {
    showHealth(null, false);
  }
  if (wait) nextLook = setTimeout(watchHealth, wait);
}

// --- Start --------------------------------------------------------------------------------

document.documentElement.lang = LANGUAGE;
for (const element of document.querySelectorAll("[data-text]"))
  element.textContent = say[element.dataset.text];
for (const element of document.querySelectorAll("[data-label]"))
  element.setAttribute("aria-label", say[element.dataset.label]);
for (const element of document.querySelectorAll("[data-placeholder]"))
  element.placeholder = say[element.dataset.placeholder];
showHealth(null, true);
watchHealth();
