"""The fingerprint tells apart what vectors depend on, and nothing else."""

from dataclasses import replace

import pytest

from ingest.errors import UnusableModel
from ingest.fingerprint import Fingerprint, weights_digest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5_000_000))
    return tmp_path


def test_other_weights_of_the_same_size_are_other_weights(folder):
    before = weights_digest(folder)
    (folder / "README.md").write_text("not a weight")
    assert weights_digest(folder) == before
    (folder / "model.safetensors").write_bytes(b"\1" * 5_000_000)
    assert weights_digest(folder) != before


def test_a_folder_without_a_model_has_no_fingerprint(tmp_path):
    with pytest.raises(UnusableModel):
        weights_digest(tmp_path / "none")


def test_a_fingerprint_survives_storage_and_names_each_difference():
    one = Fingerprint("m", "w", 384, "", "", 1)
    assert Fingerprint.from_json(one.to_json()) == one
    other = replace(one, model="n", cutter=2)
    assert one.digest != other.digest
    assert len(other.differences(one)) == 2
    assert "was 'm', now is 'n'" in other.differences(one)[0]
