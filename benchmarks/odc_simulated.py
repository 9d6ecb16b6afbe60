"""Simulates bubble rates of collective FSDP and of ODC under each way to pack, beside those of ODC's Tables 4 and 6.

    python benchmarks/odc_simulated.py
    python benchmarks/odc_simulated.py --sequences=1000 --seed=1    # fewer and other random sequences a setting
    python benchmarks/odc_simulated.py --picture=odc.png            # simulated over published

Prints one JSON line. Nothing here is measured: schedules are those of `packing_baselines.py`, lengths are sampled from
distributions (`lengths.py`), each fitted to one bubble rate, compute is a formula, and communication is free. All cells
but the fitted ones are predictions; `simulated_errors` counts predictions only.

`collective_native` is verl's own scheduler: it balances a complete rollout before it is cut into minibatches. fluxjax
trains a rollout as one minibatch; the scheduler then equals `lb_micro`, so runs do not offer it.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from lengths import KNOWN, Lengths, mean_of
from odc_published import GOLDEN, GOLDEN_MEASURED, MINIBATCHES, published

from benchmarks.packing_baselines import MicrobatchSchedule, lb_micro, lb_mini, local_sort, makespan, verl_native
from sharding.cost import ModelSizes
from sharding.planner.plan import Limits, PlanError

SEQUENCES = 6400  # of each setting
RUN = 25  # minibatches of a run, as in ODC's public example
NATIVE = 64  # samples a device in a global batch, four of the largest minibatches: the paper does not say
VARIED = {
    "minibatch": (1, 2, 4, 8, 16),
    "max_length": (8192, 16384, 32768, 65536, 131072),
    "packing_ratio": (1, 2, 3, 4),
    "devices": (2, 4, 8, 16, 32),
}

# --- compute ----------------------------------------------------------------------------------------

MODELS = {  # DeepSeek-R1-Distill-Qwen, with Qwen2.5's sizes; only the 7B model has a published fit
    name: ModelSizes(name, layers, width, heads, kv, 128, mlp, vocabulary)
    for name, layers, width, heads, kv, mlp, vocabulary in (
        ("1.5B", 28, 1536, 12, 2, 8960, 151936),
        ("7B", 28, 3584, 28, 4, 18944, 152064),
        ("14B", 48, 5120, 40, 8, 13824, 152064),
        ("32B", 64, 5120, 40, 8, 27648, 152064),
    )
}
FIT_7B = (4.348, 8.768)  # factors of (length / 32000)**2 and of length / 32000


def work(model: str, lengths: np.ndarray) -> np.ndarray:
    """Compute of a sample, forward and backward, in the unit of ODC's fit for its 7B model.

    The quadratic part grows with layers times the width of all queries, the linear part with the weights of
    projections, MLPs and the output head, as their FLOPs do.
    """
    sizes, known = MODELS[model], MODELS["7B"]
    attention = (sizes.layers * sizes.heads * sizes.head_size) / (known.layers * known.heads * known.head_size)
    units = lengths / 32000
    return FIT_7B[0] * attention * units**2 + FIT_7B[1] * sizes.linear_flops() / known.linear_flops() * units


# --- one setting ------------------------------------------------------------------------------------

Packer = Callable[..., MicrobatchSchedule]
METHODS: dict[str, tuple[Packer, str]] = {
    "collective_local_sort": (local_sort, "microbatch"),
    "collective_lb_micro": (lb_micro, "microbatch"),
    "collective_native": (verl_native, "microbatch"),
    "odc_local_sort": (local_sort, "minibatch"),
    "odc_lb_micro": (lb_micro, "minibatch"),
    "odc_lb_mini": (lb_mini, "minibatch"),
}
# In verl, all devices have equally many samples (section 5.2): LB-Mini then deals them as LB-Micro does.
METHODS_RL = METHODS | {"odc_lb_mini": METHODS["odc_lb_micro"], "odc_lb_mini_unbound": METHODS["odc_lb_mini"]}


def spans(
    methods: dict[str, tuple[Packer, str]],
    model: str,
    lengths: Lengths,
    devices: int,
    minibatch: int,
    *,
    sequences: int = SEQUENCES,
    seed: int = 0,
    ratio: float = 1.0,
) -> dict[str, np.ndarray]:
    """Returns `{method: [samples, 2]}`: mean work of a device, and the time until the last device is done, for each
    minibatch of random lengths; for verl's scheduler, for each global batch. All methods, and all distributions at one
    seed, get the same shares of the distribution. A microbatch holds `ratio` times the longest sequence."""
    limits = Limits(tokens_per_device=round(ratio * lengths.longest))
    schedules: dict[Packer, list[MicrobatchSchedule]] = {}
    for packer in {packer for packer, _ in methods.values()}:
        rng, options = np.random.default_rng(seed), {}
        together = minibatch
        if packer is verl_native:
            together, options = max(NATIVE, minibatch), {"minibatch": minibatch, "seed": seed}
        schedules[packer] = []
        for _ in range(max(sequences // (devices * together), 2)):
            drawn = lengths.draw(rng, devices * together)
            schedules[packer].append(packer(drawn, devices, limits, work=work(model, drawn), **options))
    return {
        name: np.array([(sum(schedule.work) / devices, makespan(schedule, barrier)) for schedule in schedules[packer]])
        for name, (packer, barrier) in methods.items()
    }


def rate(span: np.ndarray) -> float:
    """Percent of the devices' time in which they wait, over all samples together."""
    return float(100 * (1 - span[:, 0].sum() / span[:, 1].sum()))


def deviation(span: np.ndarray, draws: float) -> float:
    """Standard deviation of `rate` over runs of `draws` samples, percent points."""
    left = span[:, 0] - span[:, 0].sum() / span[:, 1].sum() * span[:, 1]
    return float(100 * left.std(ddof=1) / span[:, 1].mean() / draws**0.5)


# --- lengths whose spread gives one of the paper's rates --------------------------------------------

FITTED = {  # the cells that the fits reproduce: data, model, method, minibatch
    "longalign": ("longalign", "1.5B", "collective_local_sort", 1),  # at minibatch 1 all methods are the same
    "swe_smith": ("swe_smith", "1.5B", "collective_local_sort", 1),
    "aime_1.5B": ("aime", "1.5B", "collective_lb_micro", 2),  # models train on their own answers
    "aime_7B": ("aime", "7B", "collective_lb_micro", 2),
    "aime_14B": ("aime", "14B", "collective_lb_micro", 2),
}


@functools.cache
def fitted(name: str, sequences: int = SEQUENCES, seed: int = 0) -> Lengths:
    """Fits the lengths of a data set in `KNOWN`: their mean to its facts, their spread to one bubble rate. Raises
    ValueError if no spread gives that rate."""
    known, (data, model, method, minibatch) = KNOWN[name], FITTED[name]
    table = published()[data, model]
    wanted = table["rates"][method][MINIBATCHES[data].index(minibatch)]
    compute = functools.partial(work, known.model)
    target = known.mean or known.work * fitted("longalign", sequences, seed).mean(compute)

    def lengths_and_rate(spread: float) -> tuple[Lengths, float]:
        lengths = mean_of(spread, known.longest, target, np.asarray if known.mean else compute)
        chosen = {method: METHODS[method]}
        drawn = spans(chosen, model, lengths, table["devices"], minibatch, sequences=sequences, seed=seed)
        return lengths, rate(drawn[method])

    low, high = 0.05, 2.0
    for _ in range(12):
        half = (low + high) / 2
        low, high = (low, half) if lengths_and_rate(half)[1] > wanted else (half, high)
    lengths, found = lengths_and_rate((low + high) / 2)
    if abs(found - wanted) > 1:
        raise ValueError(
            f"no spread of {name} gives a bubble rate of {wanted} %, the nearest is {found:.2f} %: use more --sequences"
        )
    return lengths


def lengths_of(data: str, model: str, sequences: int = SEQUENCES, seed: int = 0) -> Lengths:
    return fitted(data if data in KNOWN else f"{data}_{model}", sequences, seed)


# --- the tables, and how far off they are -----------------------------------------------------------


def bubbles(sequences: int = SEQUENCES, seed: int = 0) -> dict[str, Any]:
    """Simulates all settings of Tables 4 and 6: rates beside the paper's, and the errors of all cells that were not
    fitted."""
    out: dict[str, Any] = {}
    cells: list[dict[str, Any]] = []
    for (data, model), table in published().items():
        lengths, methods = lengths_of(data, model, sequences, seed), METHODS_RL if data == "aime" else METHODS
        methods = {name: how for name, how in methods.items() if name in table["rates"] or name.endswith("unbound")}
        here: dict[str, Any] = {"devices": table["devices"], "minibatches": MINIBATCHES[data]}
        here |= {name: {"simulated": []} | _paper(table, name) for name in methods}
        for column, minibatch in enumerate(MINIBATCHES[data]):
            drawn = spans(methods, model, lengths, table["devices"], minibatch, sequences=sequences, seed=seed)
            for name, span in drawn.items():
                here[name]["simulated"].append(round(rate(span), 2))
                if name not in table["rates"] or _counted_elsewhere(data, name, minibatch):
                    continue
                runs = RUN * minibatch / NATIVE if name == "collective_native" else RUN
                cells.append(
                    {"data": data, "model": model, "method": "any" if minibatch == 1 else name, "minibatch": minibatch}
                    | {"simulated": round(rate(span), 2), "paper": table["rates"][name][column]}
                    | {"deviation": deviation(span, runs)}
                )
        out.setdefault(data, {})[model] = here
    return {"simulated_percent": out, "simulated_errors": _errors(cells)}


def _paper(table: dict[str, Any], method: str) -> dict[str, list[float]]:
    return {"paper": table["rates"][method]} if method in table["rates"] else {}


def _counted_elsewhere(data: str, method: str, minibatch: int) -> bool:
    """Returns whether a cell repeats another one: with one sample a device all methods are equal, and in RL both
    packings of ODC are. Such cells count once."""
    return method != "collective_local_sort" if minibatch == 1 else data == "aime" and method == "odc_lb_mini"


def _errors(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarises the errors of the cells that were not fitted, in percent points. `within_noise` is the share of cells
    whose error is less than twice the deviation between runs of `RUN` minibatches, as the paper's runs may have
    been."""
    met = [(data, model, "any" if size == 1 else method, size) for data, model, method, size in FITTED.values()]
    names = ("data", "model", "method", "minibatch")
    counted = [cell for cell in cells if tuple(cell[name] for name in names) not in met]
    for cell in counted:
        cell["error"] = round(cell["simulated"] - cell["paper"], 2)

    def summary(some: list[dict[str, Any]]) -> dict[str, Any]:
        errors = np.array([cell["error"] for cell in some])
        near = [abs(cell["error"]) < 2 * cell["deviation"] + 0.01 for cell in some]  # figures have two decimals
        means = {"mean_absolute": np.abs(errors).mean(), "mean": errors.mean(), "within_noise": np.mean(near)}
        return {"cells": len(some)} | {key: round(float(value), 2) for key, value in means.items()}

    def by(key: str) -> dict[str, Any]:
        values = dict.fromkeys(cell[key] for cell in counted)
        return {str(value): summary([cell for cell in counted if cell[key] == value]) for value in values}

    worst = sorted(counted, key=lambda cell: -abs(cell["error"]))[:5]
    for cell in worst:
        cell["deviation"] = round(cell["deviation"], 2)
    return {
        "fitted_cells": len(cells) - len(counted),
        "worst_error": abs(worst[0]["error"]),
        "worst": worst,
        "all": summary(counted),
        **{f"by_{key}": by(key) for key in ("method", "data", "model", "minibatch")},
    }


# --- the parametric study ---------------------------------------------------------------------------


def acceleration(sequences: int = SEQUENCES, seed: int = 0) -> dict[str, Any]:
    """Time of collective LB-Micro over that of ODC LB-Mini around the golden setting, one factor varied at a time."""
    base = fitted("longalign", sequences, seed)
    methods = {name: METHODS[name] for name in ("collective_lb_micro", "odc_lb_mini")}

    def gain(setting: dict[str, int]) -> float:
        lengths = base.scaled(setting["max_length"] / base.longest)
        how = {"sequences": sequences, "seed": seed, "ratio": setting["packing_ratio"]}
        drawn = spans(methods, "1.5B", lengths, setting["devices"], setting["minibatch"], **how)
        collective, odc = (drawn[name][:, 1].sum() for name in methods)
        return round(float(collective / odc), 3)

    varied = {key: {str(value): gain(GOLDEN | {key: value}) for value in values} for key, values in VARIED.items()}
    sizes, lengths, ratios, devices = (list(varied[key].values()) for key in VARIED)
    rows = published()["longalign", "1.5B"]["rates"]
    at = MINIBATCHES["longalign"].index(GOLDEN["minibatch"])
    waiting = [1 - rows[name][at] / 100 for name in methods]
    return {
        "golden": {
            "simulated": gain(GOLDEN),
            "paper_measured": round(GOLDEN_MEASURED, 3),
            "paper_from_its_bubble_rates": round(waiting[1] / waiting[0], 3),
        },
        "simulated": varied,
        "simulated_as_the_paper_says": {  # the statements of section 5.3; Figure 10 has no numbers
            "highest_at_moderate_minibatches": max(sizes[1:-1]) > max(sizes[0], sizes[-1]),
            "rises_with_length": lengths == sorted(lengths),
            "falls_with_packing_ratio": ratios == sorted(ratios, reverse=True),
            "rises_with_devices": devices == sorted(devices),
        },
    }


def simulate(sequences: int = SEQUENCES, seed: int = 0) -> dict[str, Any]:
    """Returns all results, ready for JSON. Raises ValueError if `sequences` are too few to fit the lengths."""
    by_data = {name: fitted(name, sequences, seed) for name in KNOWN}
    return {
        "sequences": sequences,
        "seed": seed,
        "compute": {"of_7b": FIT_7B, "scaled_with": "FLOPs of attention scores, and of everything linear"},
        "simulated_lengths": {
            name: {"longest": lengths.longest, "median_uncut": round(lengths.median), "mean": round(lengths.mean())}
            | {"spread": round(lengths.spread, 3), "spread_fitted_to": FITTED[name], "rest_from": KNOWN[name].source}
            for name, lengths in by_data.items()
        },
        **bubbles(sequences, seed),
        "simulated_acceleration": acceleration(sequences, seed),
    }


# --- command line -----------------------------------------------------------------------------------


def picture(result: dict[str, Any], path: str) -> None:
    """Draws four panels: simulated over published rates of each data set, and the parametric study. Raises OSError or
    ValueError for a path that cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 10))
    for axis, (data, models) in zip(axes.flat, result["simulated_percent"].items(), strict=False):
        for method, (color, marker) in zip(METHODS, zip("bgrcmk", "os^Dvx", strict=True), strict=True):
            rows = [figures[method] for figures in models.values() if method in figures]
            if rows:
                rates = [[value for row in rows for value in row[side]] for side in ("paper", "simulated")]
                axis.scatter(*rates, c=color, marker=marker, label=method.replace("_", " "))
        axis.axline((0, 0), slope=1, color="gray", linewidth=0.8)
        axis.set(title=data, xlabel="bubble rate, published (%)", ylabel="simulated (%)")
        axis.legend(fontsize="small")
    study, last = result["simulated_acceleration"], axes.flat[-1]
    for key, values in study["simulated"].items():
        ratios = [float(value) / GOLDEN[key] for value in values]
        last.plot(ratios, list(values.values()), marker="o", label=key.replace("_", " "))
    last.plot([1], [study["golden"]["paper_measured"]], "k*", markersize=12, label="golden setting, published")
    last.set(title="ODC LB-Mini over collective LB-Micro", xlabel="times the golden setting", ylabel="acceleration")
    last.set_xscale("log", base=2)
    last.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help=f"of each setting (default {SEQUENCES})")
    parser.add_argument("--seed", type=int, default=0, help="of the random lengths (default 0)")
    parser.add_argument("--picture", metavar="FILE", help="also draw simulated over published rates into this file")
    options = parser.parse_args(argv)
    try:
        if options.sequences < 64 or options.seed < 0:
            raise ValueError("--sequences must be at least 64 and --seed not negative")
        result = simulate(options.sequences, options.seed)
        if options.picture:
            picture(result, options.picture)
    except (OSError, PlanError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"benchmark": "odc_simulated"} | result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
