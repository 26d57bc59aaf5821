"""Contexts of the native architectures: a sequence is a page table over its model's pool."""

from __future__ import annotations

from contextlib import closing

import mlx.core as mx

from mlx_spec.architectures.context import Tokens, token_array
from mlx_spec.architectures.decoder import Decoder
from mlx_spec.attention.choosing import attention_pass
from mlx_spec.attention.window import IN_PASSING
from mlx_spec.kv import PagePool, PageTable
from mlx_spec.machine.memory import NO_MEMORY, bound_cache, memory_or


class PagedModel:
    """A native definition and its page pool."""

    rewind_obstacle: str | None = None

    paging_obstacle: str | None = None

    def __init__(self, module: Decoder, *, int8: bool = False) -> None:
        """int8: keys and values are stored in 8 bits, else in the type of the weights."""
        self.module = module
        arguments = module.arguments
        self.pool = PagePool(
            layers=arguments.layers,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            dtype=module.model.norm.weight.dtype,
            int8=int8,
        )

    def take_divisors(self, tokens: Tokens) -> None:
        """Take an INT8 pool's divisors from the keys of these tokens, some dozens of ordinary text.

        Without it they come from the first tokens ever read, and so does what all later ones are rounded to.
        """
        if self.pool.int8:
            with closing(self.new_context()) as context:
                context.extend(tokens, rows=0)
                context.evaluate()

    def bytes_to_allocate(self, tokens: int) -> int:
        return self.pool.bytes_to_allocate(tokens)

    def trim(self) -> None:
        self.pool.trim()

    def new_context(self, sinks: int = 0, window: int | None = None) -> PagedContext:
        return PagedContext(self.module, PageTable(self.pool, sinks, window))


class PagedContext:
    """A sequence whose keys and values are pages of its model's pool."""

    can_rewind = True

    def __init__(self, module: Decoder, table: PageTable) -> None:
        self._module, self.table = module, table

    @property
    def length(self) -> int:
        return self.table.length

    @property
    def chains_cheaply(self) -> bool:
        return self.table.pool.chains_cheaply

    @property
    def vocabulary_size(self) -> int:
        return self._module.arguments.vocabulary_size

    @property
    def nbytes(self) -> int:
        return self.table.pool.nbytes

    def reserve(self, tokens: int) -> None:
        table = self.table
        table.reserve(tokens if table.window is None else min(tokens, table.sinks + table.window + IN_PASSING))

    def extend(self, tokens: Tokens, rows: int | None = None) -> mx.array:
        tokens = token_array(tokens)
        module, pool, before = self._module, self.table.pool, self.table.state
        divisors = [*pool.divisors]
        try:
            with memory_or(NO_MEMORY):
                self.table.append(tokens.size)
                attention = attention_pass(pool, [self.table], tokens.size, module.rotary, module.arguments.heads)
                hidden = module.hidden(tokens, attention)  # (n, hidden_size)
                if rows is not None and rows < tokens.size:
                    hidden = hidden[tokens.size - rows :]
                return module.logits(hidden)
        except BaseException:
            self.table.state, pool.divisors = before, divisors
            raise

    def evaluate(self) -> None:
        with memory_or(NO_MEMORY):
            self.table.pool.evaluate()
        bound_cache()

    def rewind(self, length: int) -> None:
        self.table.rewind(length)

    def settle(self, length: int) -> None:
        self.table.settle(length)
        bound_cache()

    def fork(self) -> PagedContext:
        return PagedContext(self._module, self.table.fork())

    @property
    def prefill_rows(self) -> int:
        # On a CPU the cost per row hardly falls beyond a few dozen rows. Behind a window all scores of a pass are there
        # at once: rows x heads x (sinks + window).
        if mx.default_device() == mx.cpu:
            return 32
        return 512 if self.table.window is None else 64

    def close(self) -> None:
        try:
            self.evaluate()  # a pass that was never waited for belongs to the thread that made it
        except BaseException:
            self.table.rewind(0)
            self.table.pool.discard()
            raise
        self.table.rewind(0)
