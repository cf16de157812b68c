"""Which draft was published for which target, and what each takes of memory.

A draft learned the hidden states of one target: beside a sibling of the same size it is of no use.
So names are matched whole, but for what a quantisation adds to them.

>>> base_name("hf:mlx-community/Qwen3.5-4B-4bit-DWQ")
'Qwen/Qwen3.5-4B'
>>> draft_for("mlx-community/Qwen3.5-4B-MLX-8bit").draft.repo
'z-lab/Qwen3.5-4B-DFlash'

Sources: the models' configs, and for the drafts the cards and file sizes of z-lab, DeepSpec and
vLLM's speculators. What is read from the files themselves, once they are here, goes before this.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import hub
from .footprint import Cache, Footprint

Kind = Literal["DFlash", "DFlash 2"]


@dataclass(frozen=True)
class Model:
    """A published model: its repository, parameters in billions, and the shapes that take memory.

    ``parameters`` leaves out what is not loaded, such as a vision tower. ``also`` are other last
    parts of names for the same model. ``most_bits``: of the widest weights that are published.
    """

    repo: str
    parameters: float
    cache: Cache
    hidden: int
    vocab: int = 0
    taps: int = 0
    also: tuple[str, ...] = ()
    most_bits: float = 16

    def footprint(self, bits: float) -> Footprint:
        """What it takes with weights of ``bits``; 32 is fp32 throughout, else the rest has 16.

        Weights below 16 bits come in groups of 64 that share two numbers of 16 bits.
        """
        stored = bits if bits >= 16 else min(bits, self.most_bits) + 0.5
        return Footprint(
            weights=int(self.parameters * 1e9 * stored / 8),
            value_bytes=4 if bits == 32 else 2,
            cache=self.cache,
            hidden=self.hidden,
            inner=3 * self.hidden,
            vocab=self.vocab,
            taps=self.taps,
        )


@dataclass(frozen=True)
class Pair:
    """A ``draft`` made for a ``target``.

    ``block_size`` is what the draft's config says; None where no source gives it. A pair that is
    not ``confirmed`` is listed but never chosen. ``general`` targets are the ones to recommend:
    they answer questions in English and Chinese, and not about code only.
    """

    target: Model
    draft: Model
    kind: Kind = "DFlash"
    block_size: int | None = 16
    confirmed: bool = True
    general: bool = False


def _keys(layers: int, heads: int, size: int) -> int:
    return 2 * layers * heads * size  # with their values


def _deltas(layers: int, heads: int) -> int:
    return layers * heads * 128 * 128  # the states of gated delta nets, whose heads are all of 128


# What targets keep: of Qwen3, ...
_KEYS_36 = Cache(_keys(36, 8, 128))
_KEYS_48 = Cache(_keys(48, 4, 128))
# ... of Qwen3.5 and later, three layers of four recurrent, ...
_DELTA_4B = Cache(_keys(8, 4, 256), states=_deltas(24, 32))
_DELTA_27B = Cache(_keys(16, 4, 256), states=_deltas(48, 48))
_DELTA_35B = Cache(_keys(10, 2, 256), states=_deltas(30, 32))
_DELTA_80B = Cache(_keys(12, 2, 256), states=_deltas(36, 32))
_DELTA_122B = Cache(_keys(12, 2, 256), states=_deltas(36, 64))
_DELTA_397B = Cache(_keys(15, 2, 256), states=_deltas(45, 64))
# ... and of models that alternate between a window and all.
_OSS_20B = Cache(_keys(12, 8, 64), _keys(12, 8, 64), 128)
_OSS_120B = Cache(_keys(18, 8, 64), _keys(18, 8, 64), 128)
_GEMMA_12B = Cache(_keys(8, 1, 512), _keys(40, 8, 256), 1024)
_GEMMA_26B = Cache(_keys(5, 2, 512), _keys(25, 8, 256), 1024)
_GEMMA_31B = Cache(_keys(10, 4, 512), _keys(50, 16, 256), 1024)
_MUSE = Cache(_keys(13, 2, 128), _keys(39, 2, 128), 2048)

_QWEN3_4B = Model("Qwen/Qwen3-4B", 4.0, _KEYS_36, 2560, 151936)
_QWEN3_8B = Model("Qwen/Qwen3-8B", 8.2, _KEYS_36, 4096, 151936)
_QWEN3_14B = Model("Qwen/Qwen3-14B", 14.8, Cache(_keys(40, 8, 128)), 5120, 151936)
_QWEN3_30B = Model("Qwen/Qwen3-30B-A3B", 30.5, _KEYS_48, 2048, 151936)
_QWEN3_2507 = Model("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5, _KEYS_48, 2048, 151936)
_CODER_30B = Model("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.5, _KEYS_48, 2048, 151936)
_CODER_NEXT = Model("Qwen/Qwen3-Coder-Next", 80, _DELTA_80B, 2048, 151936)
_QWEN35_4B = Model("Qwen/Qwen3.5-4B", 4.2, _DELTA_4B, 2560, 248320)
_QWEN35_9B = Model("Qwen/Qwen3.5-9B", 9, _DELTA_4B, 4096, 248320)
_QWEN35_27B = Model("Qwen/Qwen3.5-27B", 27, _DELTA_27B, 5120, 248320)
_QWEN35_35B = Model("Qwen/Qwen3.5-35B-A3B", 35, _DELTA_35B, 2048, 248320)
_QWEN35_122B = Model("Qwen/Qwen3.5-122B-A10B", 122, _DELTA_122B, 3072, 248320)
_QWEN35_397B = Model("Qwen/Qwen3.5-397B-A17B", 397, _DELTA_397B, 4096, 248320)
_QWEN36_27B = Model("Qwen/Qwen3.6-27B", 27, _DELTA_27B, 5120, 248320)
_QWEN36_35B = Model("Qwen/Qwen3.6-35B-A3B", 35, _DELTA_35B, 2048, 248320)
_QWEN38_27B = Model("Qwen/Qwen3.8-27B", 27, _DELTA_27B, 5120, 248320)
_LLAMA31_8B = Model(
    "meta-llama/Llama-3.1-8B-Instruct",
    8.03,
    Cache(_keys(32, 8, 128)),
    4096,
    128256,
    also=("Meta-Llama-3.1-8B-Instruct",),
)
_OSS20 = Model("openai/gpt-oss-20b", 20.9, _OSS_20B, 2880, 201088, most_bits=4)
_OSS120 = Model("openai/gpt-oss-120b", 116.8, _OSS_120B, 2880, 201088, most_bits=4)
_GEMMA4_12B = Model("google/gemma-4-12B-it", 12, _GEMMA_12B, 3840, 262144)
_GEMMA4_26B = Model("google/gemma-4-26B-A4B-it", 25.8, _GEMMA_26B, 2816, 262144)
_GEMMA4_31B = Model("google/gemma-4-31B-it", 31.3, _GEMMA_31B, 5376, 262144)
_MUSE_30B = Model("meta-models/Muse-Glimmer-30B", 30, _MUSE, 6656, 202048)

# What drafts keep of the target's hidden states: five layers or so, all of them or a window.
_ALL = Cache(_keys(5, 8, 128))
_ALL_CODER = Cache(_keys(8, 4, 128))
_ALL_OSS = Cache(_keys(8, 8, 64))
_MOST_2048 = Cache(_keys(1, 8, 128), _keys(4, 8, 128), 2048)
_MOST_4096 = Cache(_keys(1, 8, 128), _keys(5, 8, 128), 4096)
_LAST_2048 = Cache(0, _keys(5, 8, 128), 2048)


def _pair(
    target: Model,
    draft: str,
    parameters: float,
    cache: Cache,
    taps: int,
    block_size: int | None,
    kind: Kind = "DFlash",
    *,
    confirmed: bool = True,
    general: bool = False,
) -> Pair:
    model = Model(draft, parameters, cache, target.hidden, taps=taps)
    return Pair(target, model, kind, block_size, confirmed, general)


# The first confirmed pair of a target is the one chosen by itself.
PAIRS = (
    _pair(_QWEN35_4B, "z-lab/Qwen3.5-4B-DFlash", 0.634, _MOST_4096, 8, 16, general=True),
    _pair(_QWEN35_9B, "z-lab/Qwen3.5-9B-DFlash", 1.292, _MOST_4096, 8, 16, general=True),
    _pair(_QWEN36_27B, "z-lab/Qwen3.6-27B-DFlash", 1.730, _MOST_2048, 5, 16, general=True),
    _pair(_QWEN36_35B, "z-lab/Qwen3.6-35B-A3B-DFlash", 0.386, _MOST_4096, 8, 16, general=True),
    _pair(_QWEN36_35B, "incoai/Qwen3.6-35B-A3B-DFlash2", 0.5, _LAST_2048, 5, 8, "DFlash 2"),
    _pair(_QWEN35_122B, "z-lab/Qwen3.5-122B-A10B-DFlash", 0.774, _MOST_4096, 8, 16, general=True),
    _pair(_QWEN35_397B, "z-lab/Qwen3.5-397B-A17B-DFlash", 1.292, _MOST_4096, 8, None, general=True),
    _pair(_QWEN35_27B, "z-lab/Qwen3.5-27B-DFlash", 2.129, _MOST_4096, 8, 16),
    _pair(_QWEN35_35B, "z-lab/Qwen3.5-35B-A3B-DFlash", 0.386, _MOST_4096, 8, 16),
    _pair(_QWEN38_27B, "z-lab/Qwen3.8-27B-DFlash2", 1.924, _LAST_2048, 5, 8, "DFlash 2"),
    _pair(_QWEN38_27B, "incoai/Qwen3.8-27B-DFlash2", 1.924, _LAST_2048, 5, 8, "DFlash 2"),
    _pair(_QWEN3_4B, "z-lab/Qwen3-4B-DFlash-b16", 0.537, _ALL, 5, 16),
    _pair(_QWEN3_4B, "deepseek-ai/dflash_qwen3_4b_block7", 0.537, _ALL, 5, 7),
    _pair(_QWEN3_8B, "z-lab/Qwen3-8B-DFlash-b16", 1.049, _ALL, 5, 16),
    _pair(_QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.dflash", 1.18, _ALL, 5, 8),
    _pair(_QWEN3_8B, "deepseek-ai/dflash_qwen3_8b_block7", 1.049, _ALL, 5, 7),
    _pair(_QWEN3_14B, "deepseek-ai/dflash_qwen3_14b_block7", 1.783, _ALL, 5, 7),
    _pair(_CODER_30B, "z-lab/Qwen3-Coder-30B-A3B-DFlash", 0.474, _ALL_CODER, 5, 16),
    _pair(_CODER_NEXT, "z-lab/Qwen3-Coder-Next-DFlash", 0.474, _ALL_CODER, 5, 16),
    _pair(_LLAMA31_8B, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 1.049, _ALL, 5, 10),
    _pair(_OSS20, "z-lab/gpt-oss-20b-DFlash", 0.785, _ALL_OSS, 5, 8),
    _pair(_OSS120, "z-lab/gpt-oss-120b-DFlash", 0.785, _ALL_OSS, 5, 10),
    _pair(_GEMMA4_12B, "z-lab/gemma4-12B-it-DFlash", 0.727, _MOST_2048, 6, 16),
    _pair(_GEMMA4_26B, "z-lab/gemma-4-26B-A4B-it-DFlash", 0.430, _MOST_2048, 6, 16),
    _pair(_GEMMA4_31B, "z-lab/gemma-4-31B-it-DFlash", 1.536, _MOST_2048, 6, 16),
    _pair(_MUSE_30B, "z-lab/Muse-Glimmer-30B-DFlash2", 2.772, _LAST_2048, 5, 16, "DFlash 2"),
    # Named by their makers, with no config seen: not chosen.
    _pair(
        _QWEN3_30B, "RedHatAI/Qwen3-30B-A3B-speculator.dflash", 0.9, _ALL, 5, None, confirmed=False
    ),
    _pair(
        _QWEN3_2507,
        "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",
        0.9,
        _ALL,
        5,
        None,
        confirmed=False,
    ),
)


# What a quantisation adds to a name, taken off its end piece by piece.
_ADDED = re.compile(
    r"[-_.](mlx|\d+(\.\d+)?-?bits?|int[48]|bf16|f(p|loat)?(8|16|32)|(mx|nv)fp[48]|q\d(_\w+)?"
    r"|gs?\d+|dwq([-_]v?\d+)?|optiq|awq|gptq|qat|mixed([-_]\d){0,2})$"
)
_BASES = {
    name.lower(): pair.target.repo
    for pair in PAIRS
    for name in (hub.last_part(pair.target.repo), *pair.target.also)
}


# By the target's source: a draft of this package knows one file of weights.
_OWN = {hub.source_of("smollm2-135m"): "smollm2-135m-dflash"}


def base_name(name: str) -> str | None:
    """The repository of the registered target that ``name`` is, or is a quantisation of.

    ``name`` is one of :mod:`dflash_engine.hub`, or an ``org/name`` of any publisher. None for a
    model that is not registered, also where only the beginning of its name is.
    """
    last = hub.last_part(hub.source_of(name)).lower()
    while last not in _BASES:
        shorter = _ADDED.sub("", last)
        if shorter == last:
            return None
        last = shorter
    return _BASES[last]


def drafts_for(target: str) -> list[Pair]:
    """All pairs for the model of this name, the preferred one first, unconfirmed ones too."""
    base = base_name(target)
    return [pair for pair in PAIRS if pair.target.repo == base]


def draft_for(target: str) -> Pair | None:
    """The pair to use for the model of this name; None if no confirmed one is registered."""
    return next((pair for pair in drafts_for(target) if pair.confirmed), None)


def own_draft(target_model: str) -> str | None:
    """The name of the draft for ``target_model`` that comes with this package, if one does."""
    return _OWN.get(hub.source_of(target_model))


def find_draft(target_model: str, models: Path) -> str | None:
    """The name of a registered draft for ``target_model`` that is on this machine, if one is.

    One that comes with this package is. Others are looked for beside the target where that is a
    folder, then among the weights pulled into ``models``; the preferred draft first.
    """
    if own := own_draft(target_model):
        return own
    drafts = [pair.draft.repo for pair in drafts_for(target_model) if pair.confirmed]
    beside: dict[str, Path] = {}
    folder = Path(hub.source_of(target_model)).expanduser()
    if drafts and folder.is_dir():
        siblings = [path for path in folder.resolve().parent.iterdir() if path.is_dir()]
        beside = {hub.last_part(path.name).lower(): path for path in siblings}
    for draft in drafts:
        if sibling := beside.get(hub.last_part(draft).lower()):
            return str(sibling)
        if hub.is_pulled(f"hf:{draft}", models):
            return f"hf:{draft}"
    return None
