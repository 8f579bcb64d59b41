import pytest
from gguf_files import random_tensors, write_gguf

from paged_jax.models import smollm2
from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.config import tiny
from paged_jax.models.load import DEFAULT_MODEL, load_model


def test_a_gguf_file_is_loaded_by_its_path(tmp_path):
    config = tiny(vocab_size=320, rms_norm_eps=2.0**-17)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    assert load_model(path).config == load_model(str(path)).config == config
    assert load_model(path, "bfloat16").config.dtype == "bfloat16"


def test_a_directory_is_taken_for_hugging_face(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load_model(tmp_path)


def test_an_unknown_name_says_what_there_is(tmp_path):
    message = "no model '.*nothing': use 'smollm2-135m', a Hugging Face directory or"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "nothing")


def test_an_unknown_dtype_says_what_there_is():
    with pytest.raises(ValueError, match="Unknown model dtype 'int8'; use one of"):
        load_model(dtype="int8")


def test_smollm2_is_the_default():
    assert DEFAULT_MODEL == smollm2.NAME == "smollm2-135m"
