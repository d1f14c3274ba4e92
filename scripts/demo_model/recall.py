"""Generated long-range recall sequences: what a sparse attention pattern breaks first.

Records of a marker and random words are scattered over real text; later the record's head is repeated and the model
has to continue it. Nothing but attention to the right early tokens can predict the answers.

| task     | what is planted                               | what is asked                                        |
|----------|-----------------------------------------------|------------------------------------------------------|
| kv_mix   | `<|key|> a b c d`, some repeated all along    | c d, whenever a b comes again                        |
| kv_dense | such records back to back                     | the same                                             |
| kv_end   | such records, all questions at the end        | the same, over the longest distances                 |
| chain    | `<|link|> a b`, `<|link|> b c`, ...           | from `<|chain|> a`: b, c, d, e                       |
| multi    | `<|key|> a b c d` several times, new c d      | from `<|all|> a b`: every c d in order               |
| update   | the same                                      | from `<|key|> a b`: the newest c d; `<|old|>`: the first |
| copy     | spans of the first half, random words or text | the span again, from its first three tokens          |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY, OLD, LINK, CHAIN, ALL = 3, 4, 5, 6, 7  # ids of corpus.SPECIAL_TOKENS
UNSCORED, TEXT, ANSWER = 0, 1, 2
SLOT = 21  # a record lies somewhere within every such stretch of text
TASKS = ("kv_mix", "kv_dense", "kv_end", "chain", "multi", "update", "copy", "text")


@dataclass(frozen=True)
class Batch:
    """Sequences, and the kind of each token as a target.

    Attributes:
        tokens: `[batch, length]` int64.
        kind: `[batch, length]` int8: `UNSCORED` (unpredictable), `TEXT` or `ANSWER`.
    """

    tokens: Tensor
    kind: Tensor


class RecallTasks:
    """Random batches of the tasks above.

    Args:
        text: `[tokens]` token stream that fills the gaps.
        words: `[words]` token ids that records are made of.
        seed: of the generator; the same seed on the same device type gives the same batches.
    """

    def __init__(self, text: Tensor, words: Tensor, seed: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.text_stream = text.to(self.device)
        self.words = words.to(self.device)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def sample(self, task: str, batch: int, length: int) -> Batch:
        """Draw `batch` sequences of `length` tokens of one of `TASKS`."""
        tokens = self.text(batch, length).long()
        kind = torch.ones_like(tokens, dtype=torch.int8)
        if task != "text":
            getattr(self, f"_{task}")(tokens, kind)
        return Batch(tokens, kind)

    def mixture(self, shares: dict[str, float], batch: int, length: int) -> Batch:
        """Draw a batch in which each task has its share; rounding goes to the last task named."""
        counts = {task: round(batch * share) for task, share in shares.items()}
        last = next(reversed(counts))
        counts[last] += batch - sum(counts.values())
        parts = [self.sample(task, count, length) for task, count in counts.items() if count > 0]
        return Batch(torch.cat([part.tokens for part in parts]), torch.cat([part.kind for part in parts]))

    def drawn(self, shares: dict[str, float], batch: int, length: int) -> Batch:
        """Draw a small batch: each sequence is of a task drawn by the shares."""
        weights = torch.tensor(list(shares.values()), device=self.device)
        names = list(shares)
        chosen = torch.multinomial(weights, batch, replacement=True, generator=self.generator).tolist()
        parts = [self.sample(names[number], 1, length) for number in chosen]
        return Batch(torch.cat([part.tokens for part in parts]), torch.cat([part.kind for part in parts]))

    # -- drawing

    def text(self, batch: int, length: int) -> Tensor:
        """Draw the text that a task writes into, `[batch, length]`: from anywhere."""
        starts = self._integers(0, self.text_stream.numel() - length, (batch, 1))
        return self.text_stream[starts + self._arange(length)]

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)

    def _arange(self, end: int) -> Tensor:
        return torch.arange(end, device=self.device)

    def _draw_words(self, *shape: int) -> Tensor:
        return self.words[self._integers(0, self.words.numel(), shape)]

    def _permutation(self, batch: int, size: int) -> Tensor:
        return self._random(batch, size).argsort(1)

    def _slot_positions(self, slots: Tensor) -> Tensor:
        """Draw the token position of a record of up to 5 tokens in each of `slots` (`[batch, records]`)."""
        return slots * SLOT + self._integers(0, SLOT - 5, tuple(slots.shape)) + 1

    @staticmethod
    def _put(tokens: Tensor, kind: Tensor, position: Tensor, marker: int | Tensor, words: Tensor, answers: int) -> None:
        """Write `marker` and `words` (`[batch, records, width]`) at `position`; the last `answers` words are asked."""
        head = torch.as_tensor(marker, device=tokens.device).expand(words.shape[:2])[..., None]
        record = torch.cat([head, words], -1)
        batch, _, width = record.shape
        where = (position[..., None] + torch.arange(width, device=tokens.device)).reshape(batch, -1)
        value = torch.tensor([UNSCORED] * (width - answers) + [ANSWER] * answers, dtype=torch.int8)
        tokens.scatter_(1, where, record.reshape(batch, -1))
        kind.scatter_(1, where, value.to(tokens.device).expand_as(record).reshape(batch, -1))

    # -- tasks: each writes its records into a batch of text

    def _repeats(self, batch: int, records: int) -> tuple[Tensor, Tensor]:
        """Draw words `[batch, records, 4]` of records; half repeat an earlier one; return also which ones."""
        repeat = self._random(batch, records) < 0.5
        repeat[:, 0] = False
        index = self._arange(records)
        earlier = (self._random(batch, records) * index).long()
        source = torch.where(repeat, earlier, index.expand(batch, records))
        for _ in range(max(1, records.bit_length())):  # pointer jumping ends at records that are no repeats
            source = source.gather(1, source)
        words = self._draw_words(batch, records, 4).gather(1, source[..., None].expand(-1, -1, 4))
        return words, repeat

    def _put_repeats(self, tokens: Tensor, kind: Tensor, position: Tensor) -> None:
        words, repeat = self._repeats(*position.shape)
        self._put(tokens, kind, position, KEY, words, 0)
        for offset in (3, 4):
            kind.scatter_(1, position + offset, torch.where(repeat, ANSWER, UNSCORED).to(kind.dtype))

    def _kv_mix(self, tokens: Tensor, kind: Tensor) -> None:
        batch, length = tokens.shape
        slots = self._arange((length - 1) // SLOT).expand(batch, -1)
        self._put_repeats(tokens, kind, self._slot_positions(slots))

    def _kv_dense(self, tokens: Tensor, kind: Tensor) -> None:
        batch, length = tokens.shape
        self._put_repeats(tokens, kind, (self._arange((length - 1) // 5) * 5 + 1).expand(batch, -1))

    def _kv_end(self, tokens: Tensor, kind: Tensor) -> None:
        batch, length = tokens.shape
        tail = max(6, length // 8)
        slots = (length - tail) // SLOT
        records = int(self._integers(max(2, slots // 4), max(3, slots * 3 // 4), (1,)))
        words = self._draw_words(batch, records, 4)
        self._put(tokens, kind, self._slot_positions(self._permutation(batch, slots)[:, :records]), KEY, words, 0)
        self._ask(tokens, kind, tail, KEY, words, 2)

    def _chain(self, tokens: Tensor, kind: Tensor, hops: int = 4) -> None:
        batch, length = tokens.shape
        tail = max(hops + 3, length // 8)
        slots = (length - tail) // SLOT
        chains = max(1, min(slots // hops, 10))
        words = self._draw_words(batch, chains, hops + 1)
        links = torch.stack([words[..., :-1], words[..., 1:]], -1).reshape(batch, chains * hops, 2)
        position = self._slot_positions(self._permutation(batch, slots)[:, : chains * hops])
        self._put(tokens, kind, position, LINK, links, 0)
        self._ask(tokens, kind, tail, CHAIN, words, hops)

    def _put_versions(self, tokens: Tensor, kind: Tensor, tail: int, versions: int) -> tuple[Tensor, Tensor]:
        """Plant keys with `versions` values each, in order; return keys `[batch, keys, 2]` and values `[..., v, 2]`."""
        batch, length = tokens.shape
        slots = (length - tail) // SLOT
        keys = max(1, min(slots // versions, 8))
        names, values = self._draw_words(batch, keys, 2), self._draw_words(batch, keys, versions, 2)
        taken = self._permutation(batch, slots)[:, : keys * versions].view(batch, keys, versions).sort(-1).values
        records = torch.cat([names[:, :, None].expand(-1, -1, versions, -1), values], -1)
        position = self._slot_positions(taken.reshape(batch, -1))
        self._put(tokens, kind, position, KEY, records.reshape(batch, keys * versions, 4), 0)
        return names, values

    def _multi(self, tokens: Tensor, kind: Tensor, versions: int = 3) -> None:
        tail = max(10, tokens.shape[1] // 8)
        names, values = self._put_versions(tokens, kind, tail, versions)
        self._ask(tokens, kind, tail, ALL, torch.cat([names, values.flatten(2)], -1), 2 * versions)

    def _update(self, tokens: Tensor, kind: Tensor, versions: int = 2) -> None:
        tail = max(12, tokens.shape[1] // 8)
        names, values = self._put_versions(tokens, kind, tail, versions)
        newest = torch.cat([names, values[:, :, -1]], -1)
        oldest = torch.cat([names, values[:, :, 0]], -1)
        old = self._random(*newest.shape[:2]) < 0.5
        words = torch.where(old[..., None], oldest, newest)
        self._ask(tokens, kind, tail, torch.where(old, OLD, KEY), words, 2)

    def _ask(self, tokens: Tensor, kind: Tensor, tail: int, marker: int | Tensor, words: Tensor, answers: int) -> None:
        """Ask as many of the `words` records (`[batch, records, width]`) as the last `tail` tokens hold, shuffled."""
        batch, records, width = words.shape
        asked = min(records, tail // (width + 2))
        chosen = self._permutation(batch, records)[:, :asked]
        if isinstance(marker, Tensor):
            marker = marker.gather(1, chosen)
        words = words.gather(1, chosen[..., None].expand(-1, -1, width))
        start = tokens.shape[1] - tail
        position = (start + self._arange(asked) * (width + 2)).expand(batch, -1)
        self._put(tokens, kind, position, marker, words, answers)

    def _copy(self, tokens: Tensor, kind: Tensor, spans: int = 4) -> None:
        batch, length = tokens.shape
        half = length // 2
        room = half // spans
        size = 3 * room // 4
        source = self._integers(1, half - size, (batch, spans))
        where = (source[..., None] + self._arange(size)).reshape(batch, -1)
        random_words = self._random(batch, 1) < 0.5
        tokens.scatter_(
            1, where, torch.where(random_words, self._draw_words(batch, spans * size), tokens.gather(1, where))
        )
        kind.scatter_(1, where, torch.where(random_words, UNSCORED, TEXT).to(kind.dtype).expand_as(where))
        copied = tokens.gather(1, where).view(batch, spans, size)  # spans may overlap: copy what stands there now
        target = half + self._arange(spans) * room + self._integers(0, room - size, (batch, spans))
        self._put(tokens, kind, target, copied[..., :1].squeeze(-1), copied[..., 1:], size - 3)
