"""The engine: requests in, text out; the host's side of the serving loop."""

import dataclasses
import operator
import reprlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paged_jax.config import ConfigError, EngineConfig
from paged_jax.device_loop import DeviceLoop
from paged_jax.memory_managers import MANAGERS
from paged_jax.memory_plan import MemoryPlan
from paged_jax.model_checks import check_model, choose_backend
from paged_jax.model_forward import ModelForward
from paged_jax.models.load import DEFAULT_MODEL, LoadedModel, load_model
from paged_jax.models.packed import pack_model
from paged_jax.outputs import RequestOutput
from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.request_record import RequestRecord
from paged_jax.request_table import RequestTable
from paged_jax.sampling_params import RequestError, SamplingParams
from paged_jax.schedule_timing import schedule_seconds
from paged_jax.state import EngineState
from paged_jax.stats import EngineStats
from paged_jax.step import Program

Prompt = str | Sequence[int]
# Its successor, half of the key of requests without a seed, has 32 bits.
MAX_SEED = 2**32 - 2


class Engine:
    """Serves requests with a model, in a fixed amount of memory.

    The state of the serving loop is on the device. The host keeps the names and the
    texts of the requests, and reads a short report after each run of steps.

    Attributes:
      config: the settings.
      model: config, parameters and tokenizer.
      tokenizer: the model's tokenizer; None if prompts come as tokens only.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        seed: int = 0,
        victim: VictimRule = latest_arrival,
    ):
        """Makes an engine; nothing is compiled before the first step or `warmup`.

        Args:
          model: config, parameters and tokenizer.
          config: the settings.
          seed: of the random draws of requests that have no seed of their own; from 0
            to `MAX_SEED`.
          victim: which running sequence to preempt when blocks run out.

        Raises:
          ConfigError: a setting that does not go with the model.
        """
        self.config = config = config or EngineConfig()
        check_model(config, model)
        self.model = model = pack_model(model, config.products, config.weights_dtype)
        self.tokenizer = model.tokenizer
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"seed is {seed}; it must be from 0 to {MAX_SEED}")
        self._static = config.step_config()
        manager = MANAGERS[config.memory]
        backend = choose_backend(
            config.attention_backend,
            model.config.head_dim,
            config.kv_dtype or model.config.dtype,
            config.cascade,
        )
        forward = ModelForward(model.config, backend, config.cascade)
        program = Program(self._static, forward, manager.on_device(), victim)
        try:
            self._device = DeviceLoop(
                program, manager, config, model.config, model.params
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            num_blocks, host_blocks = self._static.num_blocks, self._static.host_blocks
            slots = (num_blocks + host_blocks) * self._static.block_size
            size = slots * model.config.kv_bytes_per_token(config.kv_dtype)
            swap = f" and {host_blocks} of the host" if host_blocks else ""
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks{swap} takes "
                f"{size / 2**30:.3g} GiB, and memory for it, and what is kept of "
                f"{config.max_requests} requests, is not there; lower num_blocks or "
                "full_length_requests"
            ) from None
        self._table = RequestTable(self._device, manager, config, self._static, seed)
        self._ready: list[RequestOutput] = []
        self._arrivals = 0
        # Of each request: tokens of the prompt and of each output.
        self._lengths: list[tuple[int, tuple[int, ...]]] = []

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        **kwargs: Any,
    ) -> "Engine":
        """Loads a model and makes an engine for it.

        Args:
          name_or_path: a known name, a Hugging Face directory or a GGUF file.
          config: the settings; their `dtype` is the one the weights are loaded to.
          **kwargs: as for `Engine`.

        Raises:
          CheckpointError: the model cannot be read.
          ConfigError: a setting that does not go with the model.
        """
        config = config or EngineConfig()
        return cls(load_model(name_or_path, config.dtype), config, **kwargs)

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: bool = False,
    ) -> str:
        """Puts a request at the end of the queue.

        Args:
          prompt: text or token ids.
          params: how its tokens are chosen.
          request_id: a name not in use; None makes one.
          stream: whether `step` returns the request whenever it has new tokens, or only
            when it has ended.

        Returns:
          The request's name.

        Raises:
          RequestError: an empty prompt, one that is too long, or a name in use.
        """
        params = params or SamplingParams()
        name = self._new_name() if request_id is None else request_id
        if self._in_use(name):
            raise RequestError(f"request id {name!r} is in use; choose another")
        text = prompt if isinstance(prompt, str) else None
        tokens = self._tokenize(prompt)
        config = self.config
        if len(tokens) >= config.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and max_model_len is "
                f"{config.max_model_len}, which must hold one more; shorten the prompt "
                "or raise max_model_len"
            )
        if not config.chunked_prefill and len(tokens) > config.token_budget:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and token_budget is "
                f"{config.token_budget}; without chunked_prefill a prompt must fit in "
                "one step: raise token_budget or allow chunks"
            )
        record = RequestRecord(
            name=name,
            prompt=text,
            tokens=tokens,
            params=params,
            arrival=self._arrivals,
            arrival_time=time.perf_counter(),
            tokenizer=self.tokenizer,
            eos_token_ids=self.model.config.eos_token_ids,
            stream=stream,
        )
        record.check(config, self.model.config.vocab_size)
        self._arrivals += 1
        output = params.most_tokens(config.max_model_len - len(tokens))
        self._lengths.append((len(tokens), (output,) * params.num_sequences))
        self._table.add(record)
        return name

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; what it has generated is returned by `step`.

        Raises:
          RequestError: no such request is being served.
        """
        record = self._table.records.get(request_id)
        if record is None:
            raise RequestError(f"no request {request_id!r} is being served")
        if self._table.withdraw(record):
            self._ready.append(record.output("abort"))
        else:
            self._table.cancel(record)

    def has_unfinished(self) -> bool:
        """Whether any request is still to be returned as finished."""
        return bool(self._table.records or self._ready)

    def step(self, max_steps: int | None = None) -> list[RequestOutput]:
        """Runs steps on the device, then returns what is new.

        Args:
          max_steps: most steps to run; None: `config.steps_per_sync`. With more, up to
            `config.steps_per_sync_offline`, the host looks less often. No more than
            `config.steps_per_sync` are run while tokens are streamed or looked through
            for stop strings.

        Returns:
          Requests that have ended, and streaming ones with new tokens.
        """
        steps = self.config.steps_per_sync if max_steps is None else max_steps
        steps = min(steps, self.config.most_steps)
        out, self._ready = self._ready, []
        return out + self._table.step(steps)

    def stream(self, request_id: str) -> Iterator[RequestOutput]:
        """Yields a request's output as it grows; other requests are served beside it.

        Outputs of those are kept, and returned by the next `step`.

        Raises:
          RequestError: no such request is being served.
        """
        if not self._in_use(request_id):
            raise RequestError(f"no request {request_id!r} is being served")
        if request_id in self._table.records:
            self._table.records[request_id].stream = True
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        while self._in_use(request_id):
            self._ready = self.step()
            # All that is not yielded yet stays there: the caller may leave at any
            # time, or call `step`.
            while mine := [o for o in self._ready if o.request_id == request_id]:
                self._ready.remove(mine[0])
                yield mine[0]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Serves prompts to their ends.

        Args:
          prompts: one prompt or several, as text or token ids.
          params: one for all, or one for each.

        Returns:
          One output for each prompt, in their order.

        Raises:
          RequestError: a prompt that cannot be served; then none is submitted.
        """
        many = _as_list(prompts)
        each = params if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"{len(many)} prompts and {len(each)} SamplingParams; give one for all "
                "or one for each"
            )
        names: list[str] = []
        lengths = list(self._lengths)
        try:
            for prompt, one in zip(many, each, strict=True):
                names.append(self.submit(prompt, one))
        except BaseException:
            for name in names:
                self._table.withdraw(self._table.records[name])
            self._lengths = lengths
            raise
        done: dict[str, RequestOutput] = {}
        others = []
        wanted = set(names)
        while len(done) < len(names):
            for output in self.step(self.config.steps_per_sync_offline):
                if output.request_id not in wanted:
                    others.append(output)
                elif output.finished:
                    done[output.request_id] = output
        self._ready += others
        return [done[name] for name in names]

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for conversations: `[{"role": "user", "content": ...}]`.

        The model's chat template turns each into a prompt.
        """
        several = (
            messages if messages and not isinstance(messages[0], dict) else [messages]
        )
        texts = [self.chat_prompt(one) for one in several]  # type: ignore[arg-type]
        tokens = [self._tokenize(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(tokens, params)
        return [
            dataclasses.replace(output, prompt=text)
            for output, text in zip(outputs, texts, strict=True)
        ]

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """Returns the text that the model's chat template makes of a conversation."""
        if self.tokenizer is None:
            raise RequestError("the model came without a tokenizer; pass token ids")
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    # ------------------------------------------------------------------ prefixes

    def register_prefix(self, prompt: Prompt) -> str:
        """Computes a prefix and holds its blocks, once for all requests that share it.

        Requests submitted from now on whose prompts start with it share its blocks; the
        partly filled last one is copied when it is first written. Requests in service
        go on meanwhile; what they return is kept for the next `step`.

        Args:
          prompt: text or token ids. Of a text, the longest run of whole tokens that any
            continuation keeps is up to the tokenizer: end it at a natural border.

        Returns:
          The prefix's name, for `release_prefix`.

        Raises:
          RequestError: sharing is off, too many prefixes, or no room for it.
        """
        prefixes = self._table.prefixes
        prefixes.check_room()
        name = self.submit(prompt, SamplingParams(max_tokens=1))
        record = self._table.records[name]
        self._table.hold(record)
        self._lengths.pop()
        others = []
        while record.row is None and not record.failed:
            others += self.step()
        self._ready += others
        prefixes.check_held(record)
        return name

    def release_prefix(self, name: str) -> None:
        """Lets a prefix go; its blocks are freed when the last sharer has ended.

        Raises:
          RequestError: no such prefix.
        """
        self._table.release(self._table.prefixes.remove(name))

    # ------------------------------------------------------------------ inspection

    def warmup(self) -> None:
        """Compiles all programs and runs each one, so that serving compiles nothing."""
        self._device.warmup()

    @property
    def memory_plan(self) -> MemoryPlan:
        """Where the memory goes; compiles the step if that has not been done."""
        cache = self._device.state.cache
        return MemoryPlan(
            weights=sum(x.nbytes for x in jax.tree.leaves(self.model.params)),
            activations=self._device.programs.activation_bytes,
            block=cache.block_nbytes,
            num_blocks=self._static.num_blocks,
            host_blocks=self._static.host_blocks,
            block_size=self._static.block_size,
            max_model_len=self._static.max_model_len,
        )

    @property
    def compile_seconds(self) -> float:
        """What compiling took, or loading from the persistent cache."""
        return self._device.programs.compile_seconds

    @property
    def state(self) -> EngineState:
        """The engine's state, to look at; the next step donates its buffers."""
        return self._device.state

    @property
    def stats(self) -> EngineStats:
        """What was counted since the last `reset_stats`."""
        return self._device.stats

    @property
    def log(self) -> np.ndarray:
        """The steps since the last `reset_stats`, f32[iterations, F] (`Field`)."""
        return self.stats.log

    def schedule_us(self) -> float:
        """Times one iteration with the model taken out, in microseconds.

        Serves requests of the lengths submitted since the last `reset_stats`, all known
        at the start; see `schedule_timing`.
        """
        return 1e6 * schedule_seconds(self.config, self._lengths)

    def reset_stats(self) -> None:
        """Starts counting anew."""
        self._lengths = []
        self._device.reset_stats()

    # ------------------------------------------------------------------ internals

    def _new_name(self) -> str:
        """Returns the number of the next arrival, marked if that name is taken."""
        name = str(self._arrivals)
        while self._in_use(name):
            name += "'"
        return name

    def _in_use(self, name: str) -> bool:
        """Whether a request of that name has yet to be returned as finished."""
        return name in self._table.records or any(
            o.request_id == name for o in self._ready
        )

    def _tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the model came without a tokenizer; pass token ids")
            tokens = self.tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens
            )
        else:
            try:
                tokens = [operator.index(token) for token in prompt]
            except TypeError:
                raise RequestError(
                    f"a prompt is {reprlib.repr(prompt)}; it must be text or a list of "
                    "token ids"
                ) from None
        if len(tokens) == 0:
            raise RequestError("the prompt is empty; give it at least one token")
        return tuple(tokens)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns prompts as a list; one text or one list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)):
        raise RequestError(
            f"prompts is {reprlib.repr(prompts)}; it must be a prompt or a list of "
            "prompts, each text or a list of token ids"
        )
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
