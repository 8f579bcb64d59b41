"""Settings: what is derived from them, and what is refused."""

import dataclasses

import numpy as np
import pytest

from paged_jax import MANAGERS, ConfigError, EngineConfig, RequestError, SamplingParams
from paged_jax.config import MEMORY_MANAGERS, token_buckets

REFUSED = [
    ({"block_size": 3}, "block_size is 3; it must be a power of two from 1 to 256"),
    ({"block_size": 0}, "block_size is 0; it must be a power of two from 1 to 256"),
    ({"block_size": 512}, "block_size is 512; it must be a power of two"),
    (
        {"memory": "swap"},
        "memory is 'swap'; it must be one of paged, max, pow2, oracle",
    ),
    ({"batching": "x"}, "batching is 'x'; it must be one of continuous, static"),
    (
        {"preemption": "drop"},
        "preemption is 'drop'; it must be one of auto, recompute, swap",
    ),
    ({"host_blocks": -1}, "host_blocks is -1; it must be 0 or more, or None"),
    ({"host_blocks": 1.5}, "host_blocks is 1.5; it must be an integer or None"),
    (
        {"attention_backend": "triton"},
        "attention_backend is 'triton'; it must be one of "
        "auto, reference, xla, cpu, pallas",
    ),
    (
        {"cascade": True, "memory": "max"},
        "cascade is True with memory 'max' and sharing True; it needs memory 'paged'",
    ),
    ({"cascade": True, "sharing": False}, "cascade is True with memory 'paged' and sh"),
    (
        {"cascade": True, "attention_backend": "cpu"},
        "cascade is True and attention_backend cpu, which reads every context by "
        "itself; use xla or turn it off",
    ),
    ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32, bfloat16"),
    (
        {"weights_dtype": "int4"},
        "weights_dtype is 'int4'; it must be one of int8",
    ),
    ({"weights_dtype": 8}, "weights_dtype is 8; it must be text or None"),
    (
        {"weights_dtype": "int8", "products": "xla"},
        "weights_dtype is int8 and products is xla, which multiplies in dtype only; "
        "set products to auto or weights_dtype to None",
    ),
    (
        {"kv_dtype": "float8"},
        "kv_dtype is 'float8'; it must be one of float32, bfloat16, float16, int8, "
        "float8_e4m3fn",
    ),
    ({"max_model_len": 0}, "max_model_len is 0; it must be 1 or more"),
    ({"max_seqs": 0}, "max_seqs is 0; it must be 1 or more"),
    ({"max_requests": 0}, "max_requests is 0; it must be 1 or more"),
    ({"steps_per_sync": 0}, "steps_per_sync is 0; it must be 1 or more"),
    ({"max_stop_ids": 0}, "max_stop_ids is 0; it must be 1 or more"),
    ({"max_n": 0}, "max_n is 0; it must be 1 or more"),
    (
        {"max_n": 9, "max_seqs": 8},
        "max_n is 9 and max_seqs 8; the sequences of a request run at once: lower "
        "max_n or raise max_seqs",
    ),
    ({"max_n": 9, "max_requests": 8}, "max_n is 9 and max_requests 8; the sequences"),
    ({"token_budget": -1}, "token_budget is -1; it must be 1 or more"),
    ({"min_bucket": 0}, "min_bucket is 0; it must be 1 or more"),
    ({"watermark": 1.0}, "watermark is 1.0; it must be from 0 to below 1"),
    ({"watermark": -0.1}, "watermark is -0.1; it must be from 0 to below 1"),
    ({"max_prefixes": -1}, "max_prefixes is -1; it must be 0 or more"),
    ({"max_logprobs": -1}, "max_logprobs is -1; it must be 0 or more"),
    (
        {"token_budget": 8, "max_seqs": 9},
        "token_budget is 8 and max_seqs 9; a step must have room for one token of each "
        "sequence: raise token_budget",
    ),
    (
        {"num_blocks": 7, "max_model_len": 128, "block_size": 16},
        "the KV budget is 7 blocks, and one request of max_model_len 128 takes 8; "
        "raise num_blocks or lower max_model_len",
    ),
    (
        {"num_blocks": 7, "max_model_len": 80, "block_size": 16, "memory": "max"},
        "the KV budget is 7 blocks, and one request of max_model_len 80 takes 8",
    ),
    (
        {"prefix_caching": True, "memory": "max"},
        "prefix_caching is True with memory 'max' and sharing True; it needs memory "
        "'paged' and sharing True: change them or turn it off",
    ),
    (
        {"prefix_caching": True, "sharing": False},
        "prefix_caching is True with memory 'paged' and sharing False",
    ),
    ({"full_length_requests": 0}, "the KV budget is 0 blocks, and one request of"),
    (
        {"full_length_requests": float("nan")},
        "full_length_requests is nan; it must be finite",
    ),
    (
        {"full_length_requests": float("inf")},
        "full_length_requests is inf; it must be finite",
    ),
    # Of the wrong type.
    ({"block_size": 16.0}, "block_size is 16.0; it must be an integer"),
    ({"max_seqs": "4"}, "max_seqs is '4'; it must be an integer"),
    ({"max_seqs": True}, "max_seqs is True; it must be an integer"),
    ({"max_beam_width": 17}, "max_beam_width is 17; it must be from 1 to 16"),
    ({"max_beam_width": 0}, "max_beam_width is 0; it must be from 1 to 16"),
    (
        {"max_beam_width": 9, "max_seqs": 8},
        "max_beam_width is 9 and max_seqs 8; the sequences of a request run at once: "
        "lower max_beam_width or raise max_seqs",
    ),
    ({"max_n": 2.0}, "max_n is 2.0; it must be an integer"),
    ({"num_blocks": 12.5}, "num_blocks is 12.5; it must be an integer or None"),
    ({"watermark": None}, "watermark is None; it must be a number"),
    ({"sharing": "no"}, "sharing is 'no'; it must be True or False"),
    ({"memory": None}, "memory is None; it must be text"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_setting_out_of_range_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**changes)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0; it must be 1 or more"),
        ({"n": 2.0}, "n is 2.0; it must be an integer"),
        ({"n": None}, "n is None; it must be an integer"),
        ({"best_of": "3"}, "best_of is '3'; it must be an integer or None"),
        ({"best_of": True}, "best_of is True; it must be an integer or None"),
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be n=3 or more"),
        (
            {"best_of": 2, "temperature": 0},
            "best_of is 2 and temperature 0; greedy sequences are all the same: leave "
            "best_of out or raise the temperature",
        ),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        ({"max_tokens": -5}, "max_tokens is -5; it must be 1 or more"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 or more"),
        ({"top_k": -2}, "top_k is -2; it must be -1, 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be from 0 to 1"),
        ({"min_p": 1.1}, "min_p is 1.1; it must be from 0 to 1"),
        ({"logprobs": -1}, "logprobs is -1; it must be None, 0 or more"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 2**64 - 1"),
        ({"seed": 2**64}, f"seed is {2**64}; it must be from 0 to 2**64 - 1"),
        ({"stop": ""}, "stop has an empty string; every output would end at once"),
        ({"stop": ["a", ""]}, "stop has an empty string"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be an integer or None"),
        ({"max_tokens": "9"}, "max_tokens is '9'; it must be an integer or None"),
        ({"temperature": None}, "temperature is None; it must be a number"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"stop": 3}, "stop is 3; it must be text or a list of texts"),
        ({"stop": [3]}, "stop is [3]; it must be text or a list of texts"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5'; it must be a list of ids"),
        ({"stop_token_ids": [5.5]}, "stop_token_ids is [5.5]; it must be a list of"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(fields, message):
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_every_memory_manager_can_be_chosen():
    assert sorted(MEMORY_MANAGERS) == sorted(MANAGERS)


def test_numbers_of_numpy_are_welcome():
    config = EngineConfig(block_size=np.int64(8), watermark=np.float32(0.25))
    assert config == EngineConfig(block_size=8, watermark=0.25)
    params = SamplingParams(max_tokens=np.int32(3), stop_token_ids=np.array([4]))
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(4,), temperature=1)


def test_stop_is_one_string_or_several():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams().stop == SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


@pytest.mark.parametrize("budget", [1, 5, 8, 9, 16, 24, 25, 100, 128, 2048])
def test_buckets_end_with_the_budget_and_pad_by_a_third_at_most(budget):
    buckets = token_buckets(budget)
    assert buckets[-1] == budget and list(buckets) == sorted(set(buckets))
    for tokens in range(8, budget + 1):
        size = next(size for size in buckets if size >= tokens)
        assert tokens <= 16 or size < 1.5 * tokens


@pytest.mark.parametrize(
    ("min_bucket", "buckets"),
    [(1, (8, 16, 24, 32, 40)), (16, (16, 24, 32, 40)), (20, (24, 32, 40)), (64, (40,))],
)
def test_small_buckets_can_be_left_out(min_bucket, buckets):
    config = EngineConfig(token_budget=40, max_seqs=8, min_bucket=min_bucket)
    assert config.step_config().buckets == buckets


def test_the_budget_in_requests_counts_whole_blocks():
    config = EngineConfig(max_model_len=100, block_size=16, full_length_requests=3)
    assert config.total_blocks == 3 * 7 and config.blocks_per_request == 7
    assert dataclasses.replace(config, num_blocks=40).total_blocks == 40


def test_contiguous_chunks_are_powers_of_two_in_the_same_memory():
    paged = EngineConfig(max_model_len=100, block_size=16, full_length_requests=3)
    chunks = dataclasses.replace(paged, memory="max")
    assert chunks.blocks_per_request == 8
    assert chunks.total_blocks == paged.total_blocks


def test_what_is_not_compiled_does_not_change_the_step():
    config = EngineConfig(memory="max", max_model_len=64)
    for changes in (
        {"memory": "pow2"},
        {"memory": "oracle"},
        {"batching": "static"},
        {"debug": True},
        {"sharing": False},
    ):
        other = dataclasses.replace(config, **changes)
        assert other.step_config() == config.step_config()
        assert hash(other.step_config()) == hash(config.step_config())


def test_prefixes_have_rows_and_slots_of_their_own():
    config = EngineConfig(max_seqs=8, max_requests=32, max_prefixes=3)
    step = config.step_config()
    assert (step.num_rows, step.num_requests) == (8 + 3, 32 + 3)
    for changes in ({"sharing": False}, {"max_prefixes": 0}, {"memory": "max"}):
        step = dataclasses.replace(config, **changes).step_config()
        assert (step.num_rows, step.num_requests) == (8, 32) and not step.sharing
