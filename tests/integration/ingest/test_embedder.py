"""A real embedding model from a folder."""

from dataclasses import replace

import numpy as np
import pytest

from ingest import Embedder, EmbeddingModel, UnusableModel


def test_vectors_are_of_length_one_and_like_meanings_are_near(minilm):
    vectors = minilm.embed_passages(["A cat sleeps.", "A kitten naps.", "Taxes are due."])
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert minilm.embed_passages([]).shape == (0, 384)


def test_tokens_are_counted_beyond_what_the_model_reads(minilm):
    assert minilm.max_tokens == 254
    assert minilm.count_tokens("tea " * 1000) == 1000


def test_a_models_prefixes_are_part_of_what_is_embedded(minilm):
    model = replace(minilm.model, query_prefix="query: ", passage_prefix="passage: ")
    prefixed = Embedder(model, minilm.folder)
    assert prefixed.embed_queries(["tea"]) == pytest.approx(
        minilm.embed_queries(["query: tea"]), abs=1e-5
    )
    assert prefixed.max_tokens < minilm.max_tokens


def test_a_folder_that_is_not_the_named_model_is_refused(minilm, tmp_path):
    with pytest.raises(UnusableModel, match="1024"):
        Embedder(EmbeddingModel.named("BAAI/bge-m3"), minilm.folder).embed_queries(["x"])
    with pytest.raises(UnusableModel, match="no embedding model"):
        Embedder(minilm.model, tmp_path).count_tokens("x")
    with pytest.raises(UnusableModel, match="known"):
        EmbeddingModel.named("nonesuch")
