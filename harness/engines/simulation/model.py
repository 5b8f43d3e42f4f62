"""The truth of the simulated engine: a cost model of continuous batching, in virtual time. Pure; no clock, no socket.

Symbols: `b` sequences running, `g` tokens drafted a sequence and step (0: no speculation), `p` the chance that a draft
token is accepted given that all before it were, `n` tokens a request asks for, `q` its prompt tokens not in the cache.

    step time            T(b, g) = a + k*b + [g > 0]*s + d*g*b          (a: step, k: sequence, s, d: speculation)
    prefill              + f*q, once, in the step that admits the request
    tokens a step        m(g, p) = 1 + p + p^2 + ... + p^g              (m = 1 without speculation)
    steps of a request   N(n): N(0) = 0, N(n) = 1 + sum_j P(j) * N(max(0, n - j)),
                         P(j) = p^(j-1)*(1-p) for j <= g, P(g+1) = p^g  (m tokens a step, but the last step is cut)

A closed loop at concurrency C, not above `max_running`, whose client answers at once, has

    output throughput    X = C*n / (N(n)*T(C, g) + C*f*q)   which is  C / (a + k*C)  for g = 0, f = 0
    TTFT                 T + f*q*(requests admitted in the same step);   TPOT without speculation = T

Above `max_running` = M the batch stays at M: X = M*n / (N(n)*T(M, g) + M*f*q), and Little's law gives E2E = C*n/X.

A request that arrives in the first half (`JOIN`) of a running step joins it and lengthens it by its own cost; a later
one waits for the next step. So a client that needs a moment to send its next request costs nothing, and the formulas
hold as they stand. Noise multiplies step times by lognormal factors of mean 1: one a step, one a launch.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

JOIN = 0.5


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step costs, in seconds: a, k, f, s and d of the module's formulas."""

    step: float
    sequence: float
    prefill_token: float = 0.0
    draft_step: float = 0.0
    draft_token: float = 0.0

    def of(self, batch: int, drafts: int, prefill_tokens: int) -> float:
        """Seconds of one step."""
        seconds = self.step + self.sequence * batch + self.prefill_token * prefill_tokens
        return seconds + (self.draft_step + self.draft_token * drafts * batch if drafts else 0.0)

    def scaled(self, factor: float) -> "Cost":
        """The same costs on a clock that runs `factor` times as long."""
        return Cost(
            self.step * factor,
            self.sequence * factor,
            self.prefill_token * factor,
            self.draft_step * factor,
            self.draft_token * factor,
        )


@dataclass(frozen=True, slots=True)
class Speculation:
    """How many tokens are drafted at which batch, and the chance that one is accepted.

    `tiers` are (smallest batch, tokens drafted), ascending by batch: ((1, 4), (8, 2), (32, 0)) drafts 4 up to
    batch 7, 2 up to 31 and none from 32 on. Adaptive speculation is a matter of tiers. Empty: no speculation.
    """

    tiers: tuple[tuple[int, int], ...] = ()
    acceptance: float = 0.0

    def drafts(self, batch: int) -> int:
        """Tokens drafted a sequence at this batch."""
        chosen = 0
        for smallest, drafts in self.tiers:
            if batch >= smallest:
                chosen = drafts
        return chosen


@dataclass(slots=True)
class Noise:
    """Lognormal factors of mean 1: one a launch, drawn once, and one a step."""

    step_sigma: float = 0.0
    launch_sigma: float = 0.0
    seed: int = 0
    launch_factor: float = field(init=False)
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.launch_factor = self._draw(self.launch_sigma)

    def factor(self) -> float:
        """What to multiply the next step's time by."""
        return self.launch_factor * self._draw(self.step_sigma)

    def _draw(self, sigma: float) -> float:
        return math.exp(self._random.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: what it asks for, how far it is. `seed` makes its accepted drafts its own, whatever the batch."""

    tokens: int
    prefill_tokens: int = 0
    seed: int = 0
    produced: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    _random: random.Random | None = None

    def advance(self, drafts: int, acceptance: float) -> int:
        """Take one step; returns how many tokens it brought, never more than were asked for."""
        brought = 1
        if drafts:
            brought = min(1 + self._accepted(drafts, acceptance), self.tokens - self.produced)
            self.drafts += 1
            self.drafted += drafts
            self.accepted += brought - 1
        self.steps += 1
        self.produced += brought
        return brought

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return self.produced >= self.tokens

    def _accepted(self, drafts: int, acceptance: float) -> int:
        if self._random is None:
            self._random = random.Random(self.seed)
        for position in range(drafts):
            if self._random.random() >= acceptance:
                return position
        return drafts


@dataclass(slots=True)
class Step:
    """The step in flight; a request that joins moves `ends`, and may change the `drafts` of an adaptive server."""

    began: float
    factor: float
    prefill_tokens: int
    drafts: int = 0
    ends: float = 0.0


class Batcher:
    """Continuous batching: who runs, who waits, when the step in flight ends; in seconds of the caller's clock."""

    def __init__(self, cost: Cost, speculation: Speculation, *, max_running: int, noise: Noise | None = None) -> None:
        self.cost = cost
        self.speculation = speculation
        self.max_running = max_running
        self.noise = noise or Noise()
        self.slowdown = 1.0
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.step: Step | None = None

    def arrive(self, request: Request, now: float) -> None:
        """Take a request: into the step in flight while that is young and has room, else into the queue."""
        step = self.step
        young = step is not None and now <= step.began + JOIN * (step.ends - step.began)
        if step is not None and young and not self.waiting and len(self.running) < self.max_running:
            self.running[request] = None
            step.prefill_tokens += request.prefill_tokens
            self._time(step)
        else:
            self.waiting.append(request)

    def start(self, now: float) -> Step | None:
        """Begin the next step at `now` with everyone there is room for; None when there is nobody."""
        admitted = 0
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            self.running[request] = None
            admitted += request.prefill_tokens
        if not self.running:
            self.step = None
            return None
        self.step = Step(now, self.noise.factor(), admitted)
        self._time(self.step)
        return self.step

    def finish(self) -> list[tuple[Request, int]]:
        """End the step in flight: each running request and the tokens it got; those that are done leave."""
        if self.step is None:
            return []
        drafts, acceptance = self.step.drafts, self.speculation.acceptance
        brought = [(request, request.advance(drafts, acceptance)) for request in self.running]
        self.running = {request: None for request in self.running if not request.done}
        self.step = None
        return brought

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away; the step in flight keeps its length."""
        if request in self.running:
            del self.running[request]
        elif request in self.waiting:
            self.waiting.remove(request)

    def _time(self, step: Step) -> None:
        batch = len(self.running)
        step.drafts = self.speculation.drafts(batch)
        seconds = self.cost.of(batch, step.drafts, step.prefill_tokens)
        step.ends = step.began + seconds * step.factor * self.slowdown


def tiers_of(drafts: int, max_batch: int | None, tiers: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Tiers from the three ways to say them: a fixed number, with an upper batch, or spelt out (which wins)."""
    if tiers:
        return tuple(sorted(tiers))
    if not drafts:
        return ()
    return ((1, drafts),) if max_batch is None else ((1, drafts), (max_batch + 1, 0))
