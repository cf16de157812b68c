"""``dflash-rag bench`` as a command, on the small model."""

import json


def test_one_prompt_in_every_own_way(installation, tmp_path):
    plot = tmp_path / "bench.png"
    done = installation.run(
        "bench", "--kind", "passages", "--count", "1", "--tokens", "6", "--plot", plot, "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["modes"]) == {"none", "lookup", "block", "copies", "composed"}
    assert result["draft"] == "smollm2-135m-dflash"
    assert result["heldout"] is True
    assert all(of["identical"] for of in result["modes"].values())
    assert result["plain_tps"] > 0
    assert result["always_wrong_ratio"] > 0
    assert result["quoted_ratio"] > 0
    assert 0 < result["prefix"]["memory"] < result["prefix"]["cold"]
    assert plot.read_bytes()[:4] == b"\x89PNG"
    # Nothing of the engine's own was touched.
    assert not (installation.home / "engine" / "memory.bin").exists()


def test_what_cannot_be_compared_is_refused_in_a_line(installation, tmp_path):
    for arguments, why in (
        (("--kind", "poems"), "no prompts of the kind 'poems'"),
        (("--count", "11"), "ask for 1 to 10"),
        (("--peers", tmp_path), "docs/bench.md"),
        (("--quick", "--kind", "chat"), "leave out --kind"),
        (("--wordings", tmp_path / "none.csv"), "cannot read the wordings"),
        (("--plot", tmp_path / "none" / "bench.png"), f"cannot write in {tmp_path / 'none'}"),
        (("--plot", tmp_path / "bench"), "name a file that ends in .png"),
        (("--tokens", "9000", "--count", "1"), "ask for shorter answers"),
    ):
        done = installation.run("bench", *arguments)
        assert done.returncode == 3
        assert why in done.stderr
        assert "Traceback" not in done.stderr
