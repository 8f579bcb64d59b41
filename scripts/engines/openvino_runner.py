"""Serves with OpenVINO GenAI's continuous batching on the CPU."""

import runner

BLOCK_SIZE = 32  # that of its CPU plugin
TOKENS_PER_STEP = 4096


def load(work: runner.Work) -> runner.Loaded:
    """Loads a converted model; see `runner.main`."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    precision = {"float32": "f32", "bfloat16": "bf16"}[work.dtype]
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = work.kv_tokens // BLOCK_SIZE
    scheduler.max_num_seqs = work.max_seqs
    scheduler.max_num_batched_tokens = TOKENS_PER_STEP
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipeline = genai.ContinuousBatchingPipeline(
        work.model,
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            # Its own default is a cache of 8 bits, whose tokens are others.
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": work.threads,
            "ENABLE_CPU_PINNING": False,
        },
    )
    prompts = [
        openvino.Tensor(np.array([request.prompt], np.int64))
        for request in work.requests
    ]
    configs = []
    for request in work.requests:
        config = genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        configs.append(config)

    def serve() -> list[list[int]]:
        results = pipeline.generate(prompts, configs)
        return [list(result.m_generation_ids[0]) for result in results]

    settings = {
        "num_kv_blocks": scheduler.num_kv_blocks,
        "max_num_batched_tokens": TOKENS_PER_STEP,
    }
    version = runner.versions("openvino-genai", "openvino")
    return runner.Loaded(version, serve, settings)


if __name__ == "__main__":
    runner.main(load)
