"""What was measured, as one object for JSON, and as a plot."""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from .. import blas, fit
from ..drafters.compose import Compose
from ..options import Options
from ..parts import Parts
from .answer import Answer

PLAIN = "mlx-lm"  # the way that all others are compared with
COMPOSED = "composed"
COPIES = "copies"  # composed without the draft model
WRONG = "always wrong"
QUOTED = "quoted"
REPEATED = "repeated"


@dataclass(frozen=True)
class Row:
    """One prompt's ``answers`` by the way they were given. ``prompt``: its tokens."""

    kind: str
    name: str
    prompt: int
    answers: Mapping[str, Answer]


def summary(rows: Sequence[Row], way: str) -> dict[str, Any]:
    """What ``way`` did on those of ``rows`` that it answered.

    ``tps``: tokens after the first, a second of decoding; ``ratio``: the same answers' seconds of
    mlx-lm to its own; ``median_ratio``: the middle one of the prompts; ``total_ratio``: with the
    reading of the prompts; ``prefill_tps``: prompt tokens a second until the first token; ``peak``:
    bytes; ``kept``: tokens by the drafter they came from; ``identical``: whether all tokens are
    mlx-lm's. A rate is None where nothing took time: an answer may be one token, or be known whole.
    """
    pairs = [(row, row.answers[PLAIN], row.answers[way]) for row in rows if way in row.answers]
    answers = [own for _, _, own in pairs]
    tokens = sum(len(own.tokens) - 1 for own in answers)
    seconds = sum(own.decoding for own in answers)
    told = [own.rounds for own in answers if own.rounds is not None]
    rounds = sum(told) if len(told) == len(answers) else None
    kept = sum((Counter(own.kept) for own in answers), Counter[str]())
    tps = _rate(tokens, seconds)
    plain = _rate(
        sum(len(base.tokens) - 1 for _, base, _ in pairs),
        sum(base.decoding for _, base, _ in pairs),
    )
    by_prompt = [
        own_tps / base_tps
        for base_tps, own_tps in ((_tps(base), _tps(own)) for _, base, own in pairs)
        if base_tps and own_tps
    ]
    return {
        "prompts": len(pairs),
        "tps": tps,
        "ratio": tps / plain if tps and plain else None,
        "median_ratio": median(by_prompt) if by_prompt else None,
        "total_ratio": sum(base.total for _, base, _ in pairs) / sum(own.total for own in answers),
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": _rate(tokens, rounds or 0),
        "prefill_tps": sum(row.prompt for row, _, _ in pairs) / sum(own.first for own in answers),
        "peak": max(own.peak for own in answers),
        "kept": dict(kept),
        "identical": all(own.tokens == base.tokens for _, base, own in pairs),
    }


def _rate(count: int, of: float) -> float | None:
    return count / of if count and of else None


def _tps(answer: Answer) -> float | None:
    return _rate(len(answer.tokens) - 1, answer.decoding)


def report(
    options: Options,
    tokens: int,
    parts: Parts,
    rows: Sequence[Row],
    failed: Mapping[str, str],
    prefix: Mapping[str, float] | None,
    peers: Mapping[str, str],
    heldout: bool,
) -> dict[str, Any]:
    """All of it, for JSON.

    ``plain_tps`` is mlx-lm's, and ``modes`` the other ways' :func:`summary`, on passage prompts
    (on all where there are none); ``kinds`` has those of every way by kind of prompt. ``heldout``
    says that the draft was not trained on the documents of the passage prompts.
    ``always_wrong_ratio``, ``repeated_ratio`` (questions asked again in other words),
    ``same_words_ratio`` (in the same ones) and ``quoted_ratio`` are those of composed drafting,
    None where it was not measured. ``prefix``:
    seconds to the first token. ``widths``: the tokens that composed drafting checked round after
    round, a list for each prompt. ``failed``: ways that could not answer, and why.
    """
    assert isinstance(parts.drafter, Compose)
    kinds = list(dict.fromkeys(row.kind for row in rows))
    by_kind = {
        kind: {way: summary(own, way) for way in _ways(own)}
        for kind, own in ((kind, [row for row in rows if row.kind == kind]) for kind in kinds)
    }
    main = [row for row in rows if row.kind == "passages"]
    main = main or [row for row in rows if row.kind not in (QUOTED, REPEATED)]
    modes = {way: summary(main, way) for way in _ways(main)}
    plain, wrong = modes.pop(PLAIN), modes.pop(WRONG, None)
    composed = {kind: ways.get(COMPOSED, {}) for kind, ways in by_kind.items()}
    again, same, quoted = (composed.get(kind, {}) for kind in ("again", REPEATED, QUOTED))
    return {
        "target": options.target_name,
        "draft": options.draft.name if options.draft else None,
        "precision": fit.resolve_precision(options.target, options.precision, fit.Machine.here()),
        "heldout": heldout,
        "most_tokens": tokens,
        "machine": f"{platform.machine()} {platform.processor()}, {os.cpu_count()} cores",
        "blas": blas.load().name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")} | dict(peers),
        "plain_tps": plain["tps"],
        "modes": modes,
        "always_wrong_ratio": wrong and wrong["ratio"],
        "repeated_ratio": again.get("ratio"),
        "repeated_tokens_per_round": again.get("tokens_per_round"),
        "same_words_ratio": same.get("ratio"),
        "same_words_tokens_per_round": same.get("tokens_per_round"),
        "quoted_ratio": quoted.get("ratio"),
        "prefix": dict(prefix) if prefix else None,
        "kinds": by_kind,
        "widths": {
            kind: [r.answers[COMPOSED].widths for r in rows if r.kind == kind] for kind in kinds
        },
        "costs": asdict(parts.drafter.costs),
        "failed": dict(failed),
    }


def _ways(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(way for row in rows for way in row.answers))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw a :func:`report`: each way's speed beside mlx-lm's by kind of prompt, whose drafts were
    kept, and the widths chosen in the longest answer of each kind.

    Needs matplotlib, which ``pip install 'dflash-rag[bench]'`` brings. The format is that of the
    file's name, such as PNG.
    """
    from matplotlib.figure import Figure

    kinds: dict[str, dict[str, dict[str, Any]]] = dict(result["kinds"])
    ways = [way for way in dict.fromkeys(w for of in kinds.values() for w in of) if way != PLAIN]
    figure = Figure(figsize=(11, 11), layout="constrained")
    speed, kept, widths = figure.subplots(3, 1)

    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        places = [i for i, kind in enumerate(kinds) if way in kinds[kind]]
        speed.bar(
            [i + (number - (len(ways) - 1) / 2) * width for i in places],
            [list(kinds.values())[i][way]["ratio"] or 0 for i in places],
            width,
            label=way,
        )
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set_xticks(range(len(kinds)), list(kinds))
    speed.set_ylabel("tokens a second, of mlx-lm's")
    speed.set_title(f"{result['target']}, {result['precision']}, {result['machine']}")
    speed.legend(ncols=4, fontsize="small")

    composed = {kind: of[COMPOSED] for kind, of in kinds.items() if COMPOSED in of}
    below = [0.0] * len(composed)
    for origin in dict.fromkeys(name for of in composed.values() for name in of["kept"]):
        shares = [of["kept"].get(origin, 0) / max(of["tokens"], 1) for of in composed.values()]
        kept.bar(list(composed), shares, bottom=below, label=origin)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    kept.set_ylim(0, 1)
    kept.set_ylabel("of composed drafting's tokens,\nshare that was drafted, and by whom")
    kept.legend(fontsize="small")

    for kind, runs in result["widths"].items():
        widths.step(range(len(longest := max(runs, key=len))), longest, where="mid", label=kind)
    widths.set_xlabel("round of the longest answer")
    widths.set_ylabel("tokens checked beside the anchor")
    widths.legend(ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)
