"""The check of a run's tokens against a plain decode."""

import jax
import numpy as np

from experiments.plain_decode import first_parting, main
from paged_jax import Engine, EngineConfig, LoadedModel, SamplingParams
from paged_jax.models.config import tiny
from paged_jax.models.llama import init_params

SIZE = 32


def test_the_engine_equals_a_plain_decode_and_a_wrong_token_is_found():
    config = tiny(num_layers=1)
    model = LoadedModel(config, init_params(config, jax.random.key(1)), None)  # type: ignore[arg-type]
    settings = EngineConfig(
        block_size=4, max_model_len=SIZE, max_seqs=4, max_requests=4, token_budget=8
    )
    prompts = [[3, 5, 7], [9, 4, 4, 8, 1, 2]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(
        prompts, Engine(model, settings).generate(prompts, greedy)
    ):
        generated = list(output.outputs[0].token_ids)
        assert first_parting(model, prompt, generated, SIZE) is None
        other = int(np.random.default_rng(0).integers(10, 20))
        generated[5] = other if generated[5] != other else other + 1
        parting = first_parting(model, prompt, generated, SIZE)
        assert parting is not None and parting.position == 5 and parting.gap > 0


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert main(["plain_decode", str(tmp_path)]) == 2
    assert "give one results folder" in capsys.readouterr().err
