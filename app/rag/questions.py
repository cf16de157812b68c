"""Questions that customers could ask about a passage: from templates, and by the target itself.

They are for training a draft, which learns from the answers: what matters is that they are of the
kinds that customers ask, not that each is good.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from dflash_engine.targets import Target
from dflash_engine.training.generate import answers
from ingest import Index, Passage
from ingest.text import STOP_WORDS, index_terms, sentences

from .retrieve import scripts

ChatPrompt = Callable[[Sequence[Mapping[str, str]]], list[int]]  # as DFlash.chat_prompt

ENGLISH_TITLES = (
    "What do the documents say about {}?",
    "What should I know about {}?",
    "Can you tell me about {}?",
    "I have a question about {}.",
    "{}?",
)
ENGLISH_ACTIVITIES = ("How do I go about {}?", "What should I know before {}?")
ENGLISH_SENTENCES = ("Is it true that {}?", "Is it right that {}?", "Someone told me that {}?")
ENGLISH_WORDS = ("{}", "What about {}?", "I am looking for {}.")
CHINESE_TITLES = (
    "關於{}，文件裡怎麼說？",
    "請問{}是怎麼樣的？",
    "可以介紹一下{}嗎？",
    "我想了解{}。",
    "{}？",
)
CHINESE_SENTENCES = ("請問{}嗎？", "聽說{}，對嗎？", "{}，是不是？")
CHINESE_WORDS = ("{}", "請問{}？", "{}怎麼樣？")
WRITE_ENGLISH = (
    "Write {n} short questions that a customer could ask and that this passage answers. One "
    "question a line, nothing else.\n\n{text}"
)
WRITE_CHINESE = (
    "請根據下列段落，寫出 {n} 個客人可能會問、而且段落裡有答案的簡短問題。"
    "每行一個問題，不要寫別的。\n\n{text}"
)

_WORDS = 3  # of a question that is keywords, at most
_TOKENS = 32  # that a question of the target's own may take
_NUMBERING = re.compile(r"(?:第?[\d一二三四五六七八九十]+[.、．)）章節]\s*|[\d.]+\s+)+")
_WORD = re.compile(r"[^\W_\u2e80-\u9fff\uf900-\ufaff]+(?:[-'’.][^\W_\u2e80-\u9fff\uf900-\ufaff]+)*")
_HAN_WORD = re.compile(r"(?<![\u3400-\u9fff])[\u3400-\u9fff]{2,6}(?![\u3400-\u9fff])")
_LISTED = re.compile(
    r"(?:[\s>*•·\-–—#\"'“「『(（]+|(?:question|q|問題|问题|問|问)?\s*\d*\s*[.:：、)）](?!\d))+",
    re.IGNORECASE,
)
_ASKS = re.compile(r"[?？][\"'”」』*)）]*$")


@dataclass(frozen=True)
class Question:
    """What a customer could ask, and the passage that it was made from."""

    text: str
    passage: Passage


def from_templates(
    passages: Sequence[Passage], index: Index, *, each: int = 4, seed: int = 0
) -> Iterator[Question]:
    """At most ``each`` questions a passage: about its heading, whether one of its sentences is so,
    and of its rarest words; in Chinese (Traditional) where the passage is, else in English.

    The same for the same passages and ``seed``. ``index`` tells which words are rare.
    """
    for passage in passages:
        chance = random.Random(f"{seed} {passage.id}")
        kinds = (_of_title(passage), _of_sentences(passage), _of_words(passage, index))
        shuffled = [chance.sample(kind, len(kind)) for kind in kinds]
        mixed = chain.from_iterable(zip_longest(*shuffled))
        texts = dict.fromkeys(text for text in mixed if text)
        yield from (Question(text, passage) for text in list(texts)[:each])


def from_target(
    passages: Sequence[Passage],
    target: Target,
    chat_prompt: ChatPrompt,
    *,
    each: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[Question]:
    """At most ``each`` questions a passage that ``target`` writes when asked to, as they come.

    ``chat_prompt`` makes tokens of a conversation for it. A passage may get none: small models do
    not always do what they are told. Use it on the target's thread; errors as of
    :func:`dflash_engine.training.generate.answers`.
    """
    prompts = [chat_prompt([{"role": "user", "content": _request(p, each)}]) for p in passages]
    written = answers(
        target, prompts, max_tokens=_TOKENS * each, temperature=temperature, seed=seed
    )
    for number, tokens in written:
        text = target.tokenizer.decode([t for t in tokens if t not in target.stop_tokens])
        for question in parse(text, each):
            yield Question(question, passages[number])


def parse(text: str, most: int) -> list[str]:
    """At most ``most`` different questions of a model's ``text``: what ends in a question mark and
    is of a question's length, without numbers, bullets, labels and quotes around it.
    """
    found: dict[str, str] = {}
    for start, end in sentences(text):
        line = text[start:end]
        if listed := _LISTED.match(line):
            line = line[listed.end() :]
        question = _ASKS.sub(lambda match: match.group()[0], line)
        least, longest = (4, 60) if _is_chinese(question) else (10, 200)
        if question.endswith(("?", "？")) and least <= len(question) <= longest:
            found.setdefault("".join(index_terms(question)), question)
    return list(found.values())[:most]


def _request(passage: Passage, each: int) -> str:
    wording = WRITE_CHINESE if _is_chinese(passage.text) else WRITE_ENGLISH
    title = _title(passage)
    text = passage.text if passage.text.startswith(title) else f"{title}\n{passage.text}"
    return wording.format(n=each, text=text)


def _of_title(passage: Passage) -> list[str]:
    title = _NUMBERING.sub("", _title(passage), count=1).strip(" .:：。？?")
    if not title:
        return []
    if _is_chinese(title):
        return [wording.format(title) for wording in CHINESE_TITLES]
    first, _, rest = title.partition(" ")
    if rest and first.lower().endswith("ing"):
        activity = f"{first.lower()} {rest}"
        return [w.format(activity) for w in (*ENGLISH_ACTIVITIES, *ENGLISH_TITLES)]
    return [wording.format(title) for wording in ENGLISH_TITLES]


def _of_sentences(passage: Passage) -> list[str]:
    found = []
    for sentence in _sentences(passage):
        statement = sentence.rstrip(" .。!！;；")
        chinese = _is_chinese(statement)
        least, longest = (8, 50) if chinese else (20, 140)
        whole = sentence.endswith((".", "。", "!", "！", "；"))  # not a title, or a table's row
        if not whole or not least <= len(statement) <= longest:
            continue
        first, space, rest = statement.partition(" ")
        if first.lower() in STOP_WORDS and first != "I":
            statement = first.lower() + space + rest
        wordings = CHINESE_SENTENCES if chinese else ENGLISH_SENTENCES
        found += [wording.format(statement) for wording in wordings]
    return found


def _of_words(passage: Passage, index: Index) -> list[str]:
    frequency = index.document_frequency(sorted(set(index_terms(passage.text))))
    found = []
    for sentence in _sentences(passage):
        chinese = _is_chinese(sentence)
        words = dict.fromkeys((_HAN_WORD if chinese else _WORD).findall(sentence))
        known = {word: _occurs(word, frequency) for word in words}
        rare = sorted(
            (w for w in known if known[w] and (chinese or _tells(w))), key=known.__getitem__
        )[: 1 if chinese else _WORDS]
        if not any(word[0].isalpha() for word in rare) or len(rare) < (1 if chinese else 2):
            continue
        phrase = " ".join(word for word in words if word in rare)  # as the sentence has them
        found += [w.format(phrase) for w in (CHINESE_WORDS if chinese else ENGLISH_WORDS)]
    return found


def _occurs(word: str, frequency: Mapping[str, int]) -> int:
    # In how many passages; 0 for what the index does not know.
    return min((frequency.get(term, 0) for term in index_terms(word)), default=0)


def _tells(word: str) -> bool:
    return word.lower() not in STOP_WORDS and (len(word) > 2 or word.isdigit())


def _sentences(passage: Passage) -> list[str]:
    titles = {title.strip() for title in passage.heading.split(" > ")}
    texts = (passage.text[start:end].strip() for start, end in sentences(passage.text))
    return [text for text in texts if text not in titles]


def _title(passage: Passage) -> str:
    return passage.heading.rsplit(" > ", 1)[-1].strip()


def _is_chinese(text: str) -> bool:
    return "han" in scripts(text)
