"""Do verdicts deserve their name? Simulated experiments with known truth, through the functions that users rely on.

    python benchmarks/verdicts.py            prints the figures
    python benchmarks/verdicts.py --write    puts them into docs/verdicts.md

Everything here is simulated: noise of known size on curves of known shape. No server is started.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from harness.files import write_atomic
from harness.stats.arms import Arm, Cell, Launch
from harness.stats.compare import Settings, compare
from harness.stats.factorial import effects
from harness.stats.intervals import interval, ordered, p_value, paired, resample, unpaired
from harness.stats.percentiles import fewest
from harness.stats.refine import Goal, next_step

Floats = npt.NDArray[np.float64]

GRID = (1, 2, 5, 10, 30, 70, 100, 250)
SEED = 20261129
EXPERIMENTS = 2000
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "verdicts.md"


@dataclass(frozen=True)
class Noise:
    """Standard deviations on the log scale: of a launch as a whole, of a level within it, of its slices.

    `drift` is added to every launch after the first, in time: a machine that warms up. `heavy` draws from Student's t
    with 4 degrees of freedom, scaled to the same deviation.
    """

    launch: float = 0.010
    level: float = 0.005
    slices: float = 0.02
    drift: float = 0.0
    heavy: bool = False

    def draw(self, source: np.random.Generator, size: int | tuple[int, int], deviation: float) -> Floats:
        """Noise of one kind."""
        if not self.heavy:
            return source.normal(0.0, deviation, size)
        return source.standard_t(4, size) * deviation / np.sqrt(2.0)  # t with 4 degrees of freedom has variance 2


@dataclass(frozen=True)
class Model:
    """An arm's truth: throughput b / (a + k b) at concurrency b, the linear cost of a decoding step."""

    a: float
    k: float

    def log(self, concurrency: int) -> float:
        """Logarithm of the throughput."""
        return float(np.log(concurrency / (self.a + self.k * concurrency)))


# The fit to the published curves, and a fictitious treatment that wins below C=8 and loses above.
BASELINE = Model(a=0.0095, k=0.00129)
EAGLE3 = Model(a=0.0100, k=0.00289)
CROSSING = Model(a=0.0079, k=0.00149)  # 0.0095 + 0.00129 b = 0.0079 + 0.00149 b at b = 8
TRUE_CROSSOVER = 8.0


def differences(
    launches: int, noise: Noise, source: np.random.Generator, effect: float = 0.0, levels: int = 8
) -> Floats:
    """Log ratios of an experiment, one row a block: two launches in ABBA order, each with its own noise."""
    total = np.full((launches, levels), effect)
    for sign in (1, -1):
        own = noise.draw(source, (launches, 1), noise.launch) + noise.draw(source, (launches, levels), noise.level)
        total = total + sign * own
    # In ABBA order the treatment runs second in even blocks and first in odd ones.
    return total + noise.drift * np.where(np.arange(launches) % 2 == 0, 1.0, -1.0)[:, None]


def calibration(
    launches: int, noise: Noise = Noise(), experiments: int = EXPERIMENTS, effect: float = 0.0
) -> dict[str, float]:
    """Shares over many experiments of eight levels: any claim in a table, coverage of a level's interval, power.

    `table` is ours; `each` tests every level at 5 % by itself; `holm` is Bonferroni-Holm; `bootstrap` is the
    percentile bootstrap over launches, level by level.
    """
    source = np.random.default_rng(SEED + launches)
    counts = dict.fromkeys(("table", "each", "holm", "bootstrap", "covered", "bootstrap covered", "power"), 0.0)
    for _ in range(experiments):
        table = differences(launches, noise, source, effect)
        contrasts = [paired(column) for column in table.T]
        p = np.array([p_value(contrast) for contrast in contrasts])
        adjusted = np.array(ordered(contrasts))
        bounds = [interval(contrast) for contrast in contrasts]
        counts["table"] += (adjusted <= 0.05).any()
        counts["each"] += (p <= 0.05).any()
        counts["holm"] += p.min() * len(p) <= 0.05
        counts["power"] += (adjusted <= 0.05).mean()
        counts["covered"] += np.mean([bound.low <= effect <= bound.high for bound in bounds])
        low, high = _bootstrap(table, source)
        counts["bootstrap"] += ((low > 0) | (high < 0)).any()
        counts["bootstrap covered"] += ((low <= effect) & (effect <= high)).mean()
    return {name: float(value) / experiments for name, value in counts.items()}


def _bootstrap(table: Floats, source: np.random.Generator, draws: int = 200) -> tuple[Floats, Floats]:
    chosen = source.integers(0, len(table), (draws, len(table)))
    low, high = np.quantile(table[chosen].mean(axis=1), [0.025, 0.975], axis=0)
    return low, high


def bounds_of(share: float, experiments: int = EXPERIMENTS) -> tuple[float, float]:
    """Between which shares a simulation of that many experiments must fall, 95 %, if the true share is `share`."""
    low, high = stats.binom.interval(0.95, experiments, share)
    return low / experiments, high / experiments


def arms(
    models: Sequence[Model], blocks: Sequence[Sequence[int]], noise: Noise, source: np.random.Generator
) -> list[Arm]:
    """Arms as a run would leave them: one launch a block, each with its levels, marked as simulated."""
    return [
        Arm(
            name,
            tuple(_launch(name, model, block, levels, noise, source) for block, levels in enumerate(blocks)),
            simulated=True,
        )
        for name, model in zip("AB", models, strict=False)
    ]


def _launch(
    name: str, model: Model, block: int, levels: Sequence[int], noise: Noise, source: np.random.Generator
) -> Launch:
    common = noise.draw(source, 1, noise.launch)[0]
    cells = []
    for level in levels:
        value = float(np.exp(model.log(level) + common + noise.draw(source, 1, noise.level)[0]))
        cells.append(Cell(f"c{level}", {"mode": "closed", "concurrency": level}, {"output_tok_s": value}))
    return Launch(f"{block:02}-{name}", block, tuple(cells))


def whole_table(launches: int, experiments: int, noise: Noise = Noise(), margin: float = 1e-9) -> tuple[float, float]:
    """What `compare` says of A/A experiments: tables with any level better or worse, and levels called equivalent.

    The margin leaves no equivalence to hide behind, unless another one is given.
    """
    source = np.random.default_rng(SEED)
    blocks, claims, same = [GRID] * launches, 0, 0.0
    for _ in range(experiments):
        base, treatment = arms([BASELINE, BASELINE], blocks, noise, source)
        verdicts = [row.verdict for row in compare(base, treatment, Settings(margin=margin)).rows]
        claims += any(verdict in {"better", "worse"} for verdict in verdicts)
        same += verdicts.count("equivalent") / len(verdicts)
    return claims / experiments, same / experiments


def separate(base: int, treatment: int, noise: Noise = Noise()) -> tuple[float, float]:
    """False tables and coverage for A/A arms of separate runs, with that many launches each."""
    source, claims, covered = np.random.default_rng(SEED), 0, 0.0
    for _ in range(EXPERIMENTS):
        sides = [
            noise.draw(source, (count, 1), noise.launch) + noise.draw(source, (count, 8), noise.level)
            for count in (base, treatment)
        ]
        contrasts = [unpaired(one, other) for one, other in zip(*(side.T for side in sides), strict=True)]
        claims += min(ordered(contrasts)) <= 0.05
        covered += np.mean([bound.low <= 0 <= bound.high for bound in map(interval, contrasts)])
    return claims / EXPERIMENTS, float(covered / EXPERIMENTS)


def crossover(launches: int, experiments: int = 300, noise: Noise = Noise()) -> dict[str, float]:
    """How often a crossover at a known concurrency is claimed, covered by its interval, and how wide that is."""
    source = np.random.default_rng(SEED + launches)
    claimed, covered, widths = 0, 0, []
    for _ in range(experiments):
        base, treatment = arms([BASELINE, CROSSING], [GRID] * launches, noise, source)
        found = compare(base, treatment).crossover
        if len(found.crossings) == 1 and found.crossings[0].low and found.crossings[0].high:
            [crossing] = found.crossings
            claimed += 1
            covered += crossing.low <= TRUE_CROSSOVER <= crossing.high
            widths.append(crossing.high / crossing.low)
    return {
        "claimed": claimed / experiments,
        "covered": covered / claimed if claimed else float("nan"),
        "width": float(np.median(widths)) if widths else float("nan"),
    }


def refine(width: float, experiments: int = 80, noise: Noise = Noise()) -> dict[str, dict[str, float]]:
    """What a crossover's interval of a given width costs: the planner's blocks against the fixed grid's.

    `requests` counts 30 a level, as the seeds did; `scaled` max(30, 4 C), the harness's default.
    """
    found = {}
    for method in ("planner", "grid"):
        source, totals = np.random.default_rng(SEED), np.zeros(4)
        for _ in range(experiments):
            blocks, covered = _until(method, width, noise, source)
            levels = [level for block in blocks for level in block]
            totals += 2 * len(levels) * 30, 2 * sum(max(30, 4 * level) for level in levels), 2 * len(blocks), covered
        means = (totals / experiments).tolist()
        found[method] = dict(zip(("requests", "scaled", "launches", "covered"), means, strict=True))
    return found


def _until(
    method: str, width: float, noise: Noise, source: np.random.Generator, most: int = 24
) -> tuple[list[tuple[int, ...]], bool]:
    """The blocks that a method spends, and whether its interval covers the truth."""
    goal = Goal(grid=GRID, width=width, blocks=most)
    pair = [Arm("A", (), simulated=True), Arm("B", (), simulated=True)]
    blocks: list[tuple[int, ...]] = []
    while not (step := next_step(pair[0], pair[1], goal)).done:
        levels = step.levels if method == "planner" else GRID
        blocks.append(levels)
        pair = [
            replace(arm, launches=(*arm.launches, _launch(arm.name, model, len(blocks) - 1, levels, noise, source)))
            for arm, model in zip(pair, (BASELINE, CROSSING), strict=True)
        ]
    crossings = compare(pair[0], pair[1]).crossover.crossings
    covered = len(crossings) == 1 and (crossings[0].low or 0) <= TRUE_CROSSOVER <= (crossings[0].high or np.inf)
    return blocks, covered


def two_by_two(launches: int = 4, experiments: int = 500, noise: Noise = Noise()) -> dict[str, float]:
    """Coverage of the three effects of a 2x2 with known truth: +3 % by the stack, -10 % by speculation, x 1.2 both."""
    source = np.random.default_rng(SEED)
    truth = {("old", "off"): 0.0, ("old", "on"): np.log(0.9), ("new", "off"): np.log(1.03)}
    truth["new", "on"] = np.log(0.9 * 1.03 * 1.2)
    expected = (1.03 * 1.2**0.5, 0.9 * 1.2**0.5, 1.2)
    hits = np.zeros(3)
    for _ in range(experiments):
        built = {}
        for names, log in truth.items():
            launched = []
            for block in range(launches):
                value = float(
                    np.exp(log + noise.draw(source, 1, noise.launch)[0] + noise.draw(source, 1, noise.level)[0])
                )
                cell = Cell("c1", {"mode": "closed", "concurrency": 1}, {"output_tok_s": 90 * value})
                launched.append(Launch(f"{block}", block, (cell,)))
            built[names] = Arm("-".join(names), tuple(launched))
        found = effects(built, ("stack", "speculation"), "c1").effects
        hits += [
            effect.interval.low <= want <= effect.interval.high for effect, want in zip(found, expected, strict=True)
        ]
    return dict(zip(("stack", "speculation", "interaction"), (hits / experiments).tolist(), strict=True))


def hierarchical(launches: int, experiments: int = 300, noise: Noise = Noise()) -> float:
    """Coverage of the hierarchical bootstrap over launches and slices, for one level."""
    source, covered = np.random.default_rng(SEED + launches), 0
    for seed in range(experiments):
        sides = []
        for _ in range(2):
            levels = np.exp(
                noise.draw(source, (launches, 1), noise.launch) + noise.draw(source, (launches, 1), noise.level)
            )
            sides.append(list(levels * np.exp(noise.draw(source, (launches, 12), noise.slices))))
        bounds = resample(*sides, draws=400, seed=seed)
        covered += bounds.low <= 0 <= bounds.high
    return covered / experiments


def document() -> str:
    """docs/verdicts.md."""
    return "\n".join([_method(), _false_claims(), _power(), _crossovers(), _refined(), _factors(), _percentiles()])


def _method() -> str:
    return """# What a verdict means, and how often it is wrong

Made by `python benchmarks/verdicts.py --write`. **Everything on this page is simulated**: noise of known size on curves
of known shape, through the functions that `harness compare` uses. No server was started.

* The unit is the **server launch**. Launches of the arms alternate (A B, B A ...); a level's log ratio is taken within
  each such block, and Student's t over the blocks gives its interval. Arms of separate runs get Welch's t.
* **A whole table makes one false claim in twenty tables**, not one in twenty levels: levels are tested in the order of
  their sum of squares, each at 5 %, up to the first that is not significant (Kropf and Läuter 2002). That is exact for
  normal noise from two launches on, however much the levels of a launch move together. A permutation test cannot reach
  5 % with fewer than six launch pairs, and a bootstrap of few launches is too sure of itself, as the table shows. The
  price: a level that is both noisy and far from 1 comes early and holds up those behind it; their rows say so.
* **Equivalent** means that two one-sided tests place the ratio within the margin (2 %; Schuirmann 1987); it goes before
  better and worse. **Unresolved** says how many more launches would probably settle it (power 80 %, noncentral t).
* With **one launch an arm** there is no interval. A difference above 10 % is called, with that reason; a smaller one
  stays unresolved, unless an A/A run gave this machine's noise floor. The sentence says as much as the rows: a side
  where a row has one, by point estimate where no interval stands behind it, and "not resolved" elsewhere.
* A **crossover** is claimed between two levels with opposite verdicts. Its interval holds every concurrency at which
  the t-test cannot tell the interpolated ratio from 1 (Fieller 1954). It never reaches beyond the measured levels.
* **Not comparable** is a level that one arm lacks, that did not count in an arm, or whose arms differ in more than the
  declared treatment. Both figures stand in the table, and no ratio, interval or plateau, which would be claims.
* **Peaks** are compared over levels of one loop that both arms have: a ladder that ends lower has a lower peak. Where
  they share one level of a longer ladder, or none, there is no ratio of peaks. A published plateau stands beside
  another one, or beside a sweep that no longer climbs at its end.
* A **policy** never says go while the effective configuration is not known for both arms; nor everywhere, where a level
  could not be compared. It then says `undecided`, and what is missing.
* `harness compare` ends with 1 when a treatment is worse at a level, else with 6 when a level was not comparable (never
  compared is not the same as no regression), else with 0. `compare A B` compares every arm that both runs have with its
  namesake and names those it left out; `--arms a:b` names pairs; a run and a published table are compared by whole-run
  throughput, which is all that tables tell.

The noise: launches differ by 1 % (standard deviation, all levels of a launch alike), levels within a launch by 0.5 %.
"""


def _false_claims() -> str:
    low, high = bounds_of(0.05)
    lines = [
        "## False claims and coverage",
        "",
        f"{EXPERIMENTS} A/A experiments of eight levels for each number of launches. A procedure that makes a false",
        f"claim in 5 % of all tables stays between {low:.1%} and {high:.1%} here (binomial, 95 %).",
        "",
        "| launches an arm | **a false claim in the table** | testing each level at 5 % | Bonferroni-Holm | bootstrap "
        "over launches | **coverage of the 95 % interval** | coverage, bootstrap |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for launches in range(2, 9):
        found = calibration(launches)
        lines.append(
            f"| {launches} | **{found['table']:.1%}** | {found['each']:.1%} | {found['holm']:.1%} | "
            f"{found['bootstrap']:.1%} | **{found['covered']:.1%}** | {found['bootstrap covered']:.1%} |"
        )
    whole, _ = whole_table(3, EXPERIMENTS)
    usual = {launches: whole_table(launches, 500, margin=0.02) for launches in (3, 5, 8)}
    apart = {sizes: separate(*sizes) for sizes in ((2, 2), (3, 3), (5, 5), (8, 3))}
    heavy, drift = calibration(4, Noise(heavy=True)), calibration(4, Noise(drift=0.01))
    odd = calibration(3, Noise(drift=0.01))
    nested = {launches: hierarchical(launches) for launches in (1, 2, 4, 8)}
    return "\n".join(
        [
            *lines,
            "",
            f"The whole of `compare`, 3 launches an arm, {EXPERIMENTS} tables: {whole:.1%} with a false claim.",
            "With the usual margin of 2 %, of 500 A/A tables "
            + "; ".join(
                f"{claims:.1%} make a false claim and {same:.0%} of the levels are called equivalent with {launches}"
                for launches, (claims, same) in usual.items()
            )
            + " launches an arm.",
            "",
            "Arms of separate runs (Welch's t, launches of base and treatment): "
            + "; ".join(
                f"{one} and {other}: {claims:.1%} false tables, coverage {covered:.1%}"
                for (one, other), (claims, covered) in apart.items()
            )
            + ".",
            "",
            "Where the assumptions fail (4 launches an arm unless said):",
            "",
            f"* heavy-tailed noise (t with 4 degrees of freedom): {heavy['table']:.1%} false tables, coverage "
            f"{heavy['covered']:.1%}",
            f"* a machine that drifts by 1 % from launch to launch: {drift['table']:.1%} and {drift['covered']:.1%}; "
            f"with 3 launches, where A B B A does not close, {odd['table']:.1%} and {odd['covered']:.1%}",
            "* the hierarchical bootstrap over launches and time slices covers "
            + ", ".join(f"{share:.0%} with {launches}" for launches, share in nested.items())
            + " launches an arm; with one it sees nothing of the noise between launches. It is shown only as the",
            "  movement within one launch, never as an interval of the ratio.",
            "",
        ]
    )


def _power() -> str:
    lines = [
        "## Power",
        "",
        "Share of levels called better or worse when the treatment truly differs, all levels alike:",
        "",
        "| launches an arm | 2 % | 5 % | 10 % |",
        "|---:|---:|---:|---:|",
    ]
    for launches in range(2, 9):
        shares = [
            calibration(launches, experiments=500, effect=float(np.log1p(effect)))["power"]
            for effect in (0.02, 0.05, 0.1)
        ]
        lines.append(f"| {launches} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    return "\n".join([*lines, "", "Two launches find only gross differences; four find 5 %.", ""])


def _crossovers() -> str:
    lines = [
        "## Crossover",
        "",
        f"A fictitious treatment that wins below C={TRUE_CROSSOVER:g} and loses above, on the grid "
        f"{', '.join(map(str, GRID))}; 300 experiments each. Width is the interval's upper end over its lower end.",
        "",
        "| launches an arm | a crossover is claimed | its interval covers the truth | median width |",
        "|---:|---:|---:|---:|",
    ]
    for launches in (2, 3, 4, 6, 8):
        found = crossover(launches)
        lines.append(f"| {launches} | {found['claimed']:.0%} | {found['covered']:.1%} | {found['width']:.2f} |")
    return "\n".join([*lines, ""])


def _refined() -> str:
    lines = [
        "## Refining",
        "",
        "What it costs until a crossover's interval is no wider than a given ratio: the planner against the fixed",
        "grid, both stopping as soon as they are there (24 launches an arm at most), 80 experiments each. Stopping",
        "at the first interval that is narrow enough favours intervals that are narrow by luck, so either covers the",
        "truth somewhat less often than 95 %.",
        "",
        "| width | requests, planner | requests, grid | **fewer by** | with max(30, 4 C) a level, fewer by | launches, "
        "planner | launches, grid | covers the truth, planner | grid |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for width in (2.0, 1.5, 1.3):
        found = refine(width)
        planner, grid = found["planner"], found["grid"]
        lines.append(
            f"| {width} | {planner['requests']:.0f} | {grid['requests']:.0f} | "
            f"**{grid['requests'] / planner['requests']:.1f}x** | {grid['scaled'] / planner['scaled']:.1f}x | "
            f"{planner['launches']:.1f} | {grid['launches']:.1f} | {planner['covered']:.0%} | {grid['covered']:.0%} |"
        )
    return "\n".join([*lines, ""])


def _factors() -> str:
    shares = ", ".join(f"{name} {share:.1%}" for name, share in two_by_two().items())
    return f"""## Two by two

Stack x speculation with 4 launches of each of the four arms, 500 experiments: the 95 % intervals of the three effects
cover the truth in {shares}.
"""


def _percentiles() -> str:
    lines = [
        "## Percentiles",
        "",
        "A percentile is shown from the sample size on at which, with 99 % confidence, at least two samples lie above",
        "the true one: the smallest n with P(binomial(n, 1 - p) <= 1) <= 1 %. For p99 that is 662:",
        "0.99^662 + 662 x 0.01 x 0.99^661 = 0.0099, and 0.0100 with one sample fewer.",
        "",
        "| percentile | samples needed |",
        "|---:|---:|",
    ]
    lines += [f"| p{percentile * 100:g} | {fewest(percentile)} |" for percentile in (0.5, 0.9, 0.95, 0.99)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace docs/verdicts.md")
    text = document()
    if parser.parse_args().write:
        write_atomic(DOCUMENT, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
