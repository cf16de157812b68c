"""A real embedding model from a folder."""

import os
import subprocess
import sys
import threading
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


def test_what_is_urgent_goes_ahead_of_passages_that_are_being_embedded(minilm):
    done, started = [], threading.Event()

    def on_batch(count):
        done.append(count)
        started.set()

    passages = [f"Passage {n}. " + "It is long. " * 60 for n in range(160)]
    thread = threading.Thread(target=minilm.embed_passages, args=(passages, on_batch))
    thread.start()
    assert started.wait(60)
    before = len(done)
    urgent = minilm.embed_passages(["Short."] * 40, urgent=True)
    after = len(done)
    thread.join()
    assert urgent.shape == (40, 384)
    assert after - before <= 2  # the batch under way, and one more in which the call began
    assert done[-1] == 160


def test_loading_prints_nothing(minilm):
    program = (
        "import sys, transformers; from ingest import Embedder, EmbeddingModel;"
        "from transformers.utils import logging;"
        "e = Embedder(EmbeddingModel.named('all-MiniLM-L6-v2'), sys.argv[1]);"
        "e.embed_queries(['x']); e.count_tokens('x');"
        "sys.exit(not logging.is_progress_bar_enabled())"
    )
    command = [sys.executable, "-c", program, minilm.folder]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
