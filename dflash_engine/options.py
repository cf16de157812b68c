"""An engine's options, checked, with its models found on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from . import hub
from .drafters.compose import LONGEST
from .drafters.kind import kind_of
from .fit import Precision
from .registry import find_draft

DrafterName = Literal["auto", "none", "lookup", "block", "small", "composed"]
Bits = Literal[4, 8]


@dataclass(frozen=True)
class Options:
    """The options of :class:`dflash_engine.DFlash` that concern its parts; ``target`` and ``draft``
    are folders, ``drafter`` is not ``auto``.
    """

    target_name: str
    target: Path
    draft_name: str | None
    draft: Path | None
    drafter: DrafterName
    precision: Precision
    draft_bits: Bits | None
    kv_bits: Bits | None
    context: int | None
    width: int | None
    store: Path | None
    prefix_bytes: int
    prefix_disk_bytes: int
    memory_tokens: int

    @classmethod
    def of(
        cls,
        target_model: str,
        draft_model: str | None = None,
        *,
        drafter: DrafterName = "auto",
        models: Path | None = None,
        precision: Precision = "auto",
        draft_bits: Bits | None = None,
        kv_bits: Bits | None = None,
        context: int | None = None,
        width: int | None = None,
        store: Path | None = None,
        prefix_bytes: int = 0,
        prefix_disk_bytes: int = 0,
        memory_tokens: int = 1_000_000,
    ) -> "Options":
        """Options as DFlash takes them.

        ValueError for values out of range, and for those that do not go together; a model that is
        not here raises as :func:`dflash_engine.hub.resolve` does.
        """
        if drafter not in get_args(DrafterName):
            raise ValueError(f"drafter {drafter!r} is none of {', '.join(get_args(DrafterName))}")
        for name, bits in (("draft_bits", draft_bits), ("kv_bits", kv_bits)):
            if bits not in (None, *get_args(Bits)):
                raise ValueError(f"{name} must be 4, 8 or None, not {bits}")
        models = models or default_models()
        target = hub.resolve(target_model, models)
        if draft_model == "auto":
            by_itself = drafter in ("none", "lookup")
            draft_model = None if by_itself else find_draft(target_model, models)
        draft = hub.resolve(draft_model, models) if draft_model else None
        kind = kind_of(draft) if draft else None
        if drafter == "auto":
            drafter = "composed"
        if drafter in ("block", "small"):
            if kind != drafter:
                raise ValueError(
                    f"drafter {drafter!r} needs a draft_model of that kind, not {kind}"
                )
        elif drafter in ("none", "lookup") and draft:
            raise ValueError(f"drafter {drafter!r} has no use for a draft_model: leave one out")
        if draft_bits and kind == "small":
            raise ValueError("draft_bits is for a DFlash draft: a small model stays as stored")
        if prefix_disk_bytes and not (store and prefix_bytes):
            raise ValueError("prefix_disk_bytes needs a store, and prefix_bytes to read them into")
        if width is not None and not 0 <= width <= LONGEST:
            raise ValueError(f"width must be between 0 and {LONGEST}, not {width}")
        if width is not None and drafter != "composed":
            raise ValueError(f"width is for drafter 'composed', not {drafter!r}")
        return cls(
            target_name=hub.short_name(target_model),
            target=target,
            draft_name=hub.short_name(draft_model) if draft_model else None,
            draft=draft,
            drafter=drafter,
            precision=precision,
            draft_bits=draft_bits,
            kv_bits=kv_bits,
            context=context,
            width=width,
            store=store,
            prefix_bytes=prefix_bytes,
            prefix_disk_bytes=prefix_disk_bytes,
            memory_tokens=memory_tokens,
        )


def default_models() -> Path:
    """The folder with pulled weights: ``$DFLASH_RAG_HOME/models``, or ``var/models``."""
    return Path(os.environ.get("DFLASH_RAG_HOME") or "var") / "models"
