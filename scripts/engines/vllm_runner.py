"""Serves with vLLM's CPU build, compiled, all requests handed over at once."""

import os

import runner

# One of those that its CPU attention takes.
BLOCK_SIZE = 32
# KV space is what the block count says; this only has to be more.
SPACE_GIB = "2"


def load(work: runner.Work) -> runner.Loaded:
    """Loads and compiles; see `runner.main`."""
    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": SPACE_GIB,
        # Which cores to use was decided before.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": f"{work.cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{work.cache}/inductor",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(work.threads)
    llm = LLM(
        work.model,
        dtype=work.dtype,
        skip_tokenizer_init=True,
        max_model_len=work.max_model_len,
        max_num_seqs=work.max_seqs,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=work.kv_tokens // BLOCK_SIZE,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    prompts = [{"prompt_token_ids": request.prompt} for request in work.requests]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for request in work.requests
    ]

    def serve() -> list[list[int]]:
        results = llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    config = llm.llm_engine.vllm_config
    settings = {
        "block_size": BLOCK_SIZE,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }
    return runner.Loaded(runner.versions("vllm-cpu", "torch"), serve, settings)


if __name__ == "__main__":
    runner.main(load)
