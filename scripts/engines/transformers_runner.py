"""Serves with `transformers`: one by one, in padded batches, or continuously."""

from collections.abc import Callable, Iterator

import runner

PAGE_SIZE = 32
TOKENS_PER_STEP = 512


def load(work: runner.Work) -> runner.Loaded:
    """Loads in one of three modes; see `runner.main`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(work.threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=getattr(torch, work.dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    modes = {"one_by_one": _one_by_one, "static": _static, "continuous": _continuous}
    serve, settings, details, close = modes[work.mode](model, work)
    version = runner.versions("transformers", "torch")
    return runner.Loaded(version, serve, settings, details, close)


def _one_by_one(model, work: runner.Work) -> tuple:
    """Decodes each request alone, and notes how near each choice was."""
    import torch

    last: dict = {}

    def decode(request: runner.Request) -> tuple[list[int], list[float]]:
        cache, ids = None, torch.tensor([request.prompt])
        tokens, gaps = [], []
        for _ in range(request.max_tokens):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            best = out.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = best.indices[:1].view(1, 1)
        return tokens, gaps

    def serve() -> list[list[int]]:
        decoded = [decode(request) for request in work.requests]
        last["gaps"] = [gaps for _, gaps in decoded]
        return [tokens for tokens, _ in decoded]

    return serve, {}, lambda: dict(last), lambda: None


def _static(model, work: runner.Work) -> tuple:
    """Runs padded batches, each until its longest output is done."""
    import torch
    from transformers import GenerationConfig

    batches = list(_batches(work))

    def generate(batch: list[runner.Request]) -> list[list[int]]:
        width = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            start = width - len(request.prompt)
            ids[row, start:] = torch.tensor(request.prompt)
            mask[row, start:] = 1
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in batch),
            pad_token_id=0,
        )
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        rows = out[:, width:].tolist()
        return [row[: one.max_tokens] for row, one in zip(rows, batch)]

    def serve() -> list[list[int]]:
        return [tokens for batch in batches for tokens in generate(batch)]

    return serve, {"batches": [len(batch) for batch in batches]}, dict, lambda: None


def _batches(work: runner.Work) -> Iterator[list[runner.Request]]:
    """Yields as many requests at a time as fit in the KV budget, padded."""
    batch: list[runner.Request] = []
    for request in work.requests:
        wider = [*batch, request]
        width = max(len(one.prompt) for one in wider)
        length = width + max(one.max_tokens for one in wider)
        fits = len(wider) <= work.max_seqs and len(wider) * length <= work.kv_tokens
        if batch and not fits:
            yield batch
            wider = [request]
        batch = wider
    yield batch


def _continuous(model, work: runner.Work) -> tuple:
    """Runs the manager of `transformers` that batches continuously."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(request.max_tokens for request in work.requests)
    settings = {"page_size": PAGE_SIZE, "max_batch_tokens": TOKENS_PER_STEP}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **settings,
            num_blocks=work.kv_tokens // PAGE_SIZE,
            max_requests_per_batch=work.max_seqs,
            allow_block_sharing=False,
            use_cuda_graph=False,
        ),
    )
    manager.warmup()
    manager.start()
    round_number = _counter()

    def serve() -> list[list[int]]:
        prefix = f"{round_number()}-"
        for index, request in enumerate(work.requests):
            manager.add_request(
                request.prompt,
                request_id=f"{prefix}{index}",
                max_new_tokens=request.max_tokens,
                eos_token_id=-1,
            )
        done: dict[str, list[int]] = {}
        while len(done) < len(work.requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the thread that generates has died")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                done[result.request_id] = list(result.generated_tokens)
        return [done[f"{prefix}{index}"] for index in range(len(work.requests))]

    return serve, settings, dict, lambda: manager.stop(block=True, timeout=5)


def _counter() -> Callable[[], int]:
    numbers = iter(range(1 << 30))
    return lambda: next(numbers)


if __name__ == "__main__":
    runner.main(load)
