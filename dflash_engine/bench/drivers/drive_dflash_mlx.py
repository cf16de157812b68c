"""Runs ``dflash-mlx`` as its ``dflash generate`` does: its settings, without its prefix cache."""

from __future__ import annotations

from typing import Any

from line import Answering, Record, serve


def load(config: dict[str, Any]) -> Answering:
    """Target and draft in its own loop, which widens and narrows its blocks."""
    import mlx.core as mx
    from dflash_mlx.engine.events import TokenEvent
    from dflash_mlx.metal_limits import apply_metal_limits
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    apply_metal_limits()
    context = build_offline_runtime_context()
    models = load_runtime_bundle(
        model_ref=config["target"], draft_ref=config["draft"], verify_config=context.verify
    )
    mx.eval(models.target_model.parameters(), models.draft_model.parameters())

    def answer(prompt: list[int], record: Record) -> None:
        events = stream_dflash_generate(
            target_model=models.target_model,
            target_ops=models.target_ops,
            tokenizer=models.tokenizer,
            draft_model=models.draft_model,
            draft_backend=models.draft_backend,
            prompt_tokens_override=prompt,
            max_new_tokens=record.most,
            stop_token_ids=get_stop_token_ids(models.tokenizer),
            runtime_context=context,
        )
        cycles = 0
        for event in events:
            if isinstance(event, TokenEvent):
                record.add([event.token_id], forwards=event.cycles_completed - cycles)
                cycles = event.cycles_completed

    return answer


if __name__ == "__main__":
    serve("dflash-mlx", load)
