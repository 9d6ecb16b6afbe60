"""Mutants that tests must notice, a policy's promise broken by each: `tests/mutants.py` runs them.

The first seven passed all fault histories before promises of behaviour were checked. Where a change of the code makes
an entry impossible, mend its old text; a mutant is left out only with the promise that it breaks.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old`, which is in `file` exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


TAIL = "fluxjax/coordinator/policies/tail_batching.py"
ASYNC = "fluxjax/coordinator/policies/adaptive_async.py"
APRIL = "fluxjax/coordinator/policies/april.py"
ROUNDS = "fluxjax/coordinator/policies/rounds.py"
FLEET = "fluxjax/coordinator/engine_states.py"
MACHINE = "fluxjax/coordinator/machine.py"
LEDGER = "fluxjax/coordinator/ledger.py"
EARLY = "fluxjax/coordinator/policies/early_training.py"
SCHEDULES = "fluxjax/config/schedules.py"
EPISODES = "fluxjax/runtime/episodes.py"
VIEWS = "fluxjax/base/scored.py"
COMPOSER = "fluxjax/batch/composer.py"
INPUTS = "models/inputs.py"
REWARDS = "fluxjax/simulation/reward_stage.py"
CODE = "fluxjax/rewards/code.py"

# fmt: off
MUTANTS = [
    # --- those that nobody noticed -----------------------------------------------------------------
    Mutant("long rounds only at the end of the data", TAIL,
           "long = len(waiting) >= needed or coordinator.exhausted", "long = coordinator.exhausted"),
    Mutant("surplus winners skipped with a reason", TAIL,
           "return [entry.park() for entry in surplus]",
           "from ..messages import Skip\n\n            bad = scored[needed:]\n"
           '            return [Skip(entry.prompt, "not needed") for entry in bad] or '
           "[entry.park() for entry in surplus]"),
    Mutant("adaptive limit one less", ASYNC,
           "return math.floor(steps * settings.prompts_per_step) - coordinator.ledger.live",
           "return math.floor(steps * settings.prompts_per_step) - 1 - coordinator.ledger.live"),
    Mutant("dynamic sampling inverted", ROUNDS, "if not entry.varied]", "if entry.varied]"),
    Mutant("no extra responses in short rounds", TAIL, 'self.responses)) if self.round == "short" else 1.0', "1.0))"),
    Mutant("the barrier never", ASYNC, "self.barrier = True", "self.barrier = False"),
    Mutant("engine version taken as the newest", FLEET,
           "= min(self.served), max(self.served)", "= max(self.served), max(self.served)"),
    # --- tail batching -----------------------------------------------------------------------------
    Mutant("long rounds one prompt late", TAIL, "long = len(waiting) >= needed or", "long = len(waiting) > needed or"),
    Mutant("long rounds of twice a step", TAIL, "in waiting[:needed]}", "in waiting[: 2 * needed]}"),
    Mutant("no extra prompts in short rounds", TAIL, "self.prompts)) * needed)", "1.0)) * needed)"),
    Mutant("extra responses in long rounds, too", TAIL, 'if self.round == "short" else 1.0', "if self.round else 1.0"),
    Mutant("a won round waits for everybody", TAIL, "if late := ledger.at(PromptStage.RUNNING):", "if late := []:"),
    Mutant("what loses is skipped", TAIL,
           "return [entry.park() for entry in late]",
           "from ..messages import Skip\n\n"
           '            return [e.park() for e in late] + [Skip(e.prompt, "slow") for e in late]'),
    Mutant("losers keep their tokens", TAIL,
           "return [entry.park() for entry in late]", "return [entry.park(keep=True) for entry in late]"),
    Mutant("dropped groups are not replaced", TAIL, "missing = 0 if won else", "missing = 0 if won or running else"),
    Mutant("newest deferred prompts first", TAIL,
           "for entry in waiting[:needed]}", "for entry in waiting[-needed:]}"),
    Mutant("the last winners", TAIL, "*scored[needed:]]", "*scored[:-needed]]"),
    Mutant("schedule of extra prompts ignored", TAIL,
           'coordinator.scheduled("tail_prompts", self.prompts)', "self.prompts"),
    Mutant("schedule of extra responses ignored", TAIL,
           'coordinator.scheduled("tail_responses", self.responses)', "self.responses"),
    Mutant("held groups join all at once", TAIL, "set(first[: min(share, needed)])", "set(first[:needed])"),
    Mutant("held groups join newest first", TAIL, "(born[draw], draw))", "(born[draw], -draw))"),
    Mutant("held groups are not waited for", TAIL, "if self._held_unscored(coordinator):", "if False:"),
    Mutant("held groups a version too late", TAIL,
           "self.max_staleness - version + 1", "self.max_staleness - version + 2"),
    # --- adaptive async ----------------------------------------------------------------------------
    Mutant("adaptive limit one more", ASYNC, "- coordinator.ledger.live", "+ 1 - coordinator.ledger.live"),
    Mutant("no running ahead", ASYNC, "1 + self.ratio * self.settings.max_staleness, settings", "1, settings"),
    Mutant("runs ahead of the last step", ASYNC, "settings.steps - coordinator.step)\n", "10**9)\n"),
    Mutant("the barrier for ever too late", ASYNC,
           "self.since_sync > self.sync_interval", "self.since_sync > 10 * self.sync_interval"),
    Mutant("the barrier one step early", ASYNC,
           "self.since_sync > self.sync_interval", "self.since_sync >= self.sync_interval"),
    Mutant("no barrier for stale data", ASYNC,
           "if not self.barrier and (too_stale or", "if not self.barrier and (False or"),
    Mutant("the barrier ends while responses run", ASYNC,
           "not coordinator.awaiting and not ledger.count(*_UNDER_WAY):", "not coordinator.awaiting:"),
    Mutant("generation goes on in a barrier", ASYNC,
           "room = 0 if self.barrier or coordinator.exhausted", "room = 0 if coordinator.exhausted"),
    Mutant("prompts may become too old", ASYNC,
           "if due(to_come, limit, needed):", "if due(to_come, limit + 1, needed):"),
    Mutant("training one version too careful", ASYNC,
           "if due(to_come, limit, needed):", "if due(to_come, limit - 1, needed):"),
    Mutant("only the next step is thought of", ASYNC,
           "most = sum(left.values()) // size + 1", "most = 0"),
    Mutant("what is under way is never due", ASYNC, "due([*ages, *to_come], limit", "due(ages, limit"),
    Mutant("groups begin although they will be too old", ASYNC,
           "if not self._in_time(coordinator, entries,", "if False and not self._in_time(coordinator, entries,"),
    Mutant("the step under way has room left", ASYNC, "+ (Train in coordinator.awaiting)", "+ 0"),
    Mutant("ratio steered the wrong way", ASYNC,
           "self._pid.update(target - self.staleness)", "self._pid.update(self.staleness - target)"),
    Mutant("schedule of the target ignored", ASYNC,
           'coordinator.scheduled("target_staleness", self.settings.target_staleness)',
           "self.settings.target_staleness"),
    Mutant("weights only when everything is idle", ASYNC,
           "not fleet.running[engine] and", "not any(fleet.running) and"),
    Mutant("weights to busy engines", ASYNC, "if not fleet.running[engine] and engine not in busy)", ")"),
    Mutant("weights to engines between turns", ASYNC, "and engine not in busy)", ")"),
    Mutant("weights never to running engines", ASYNC,
           "if self.settings.interrupt:\n            return [Pub", "if False:\n            return [Pub"),
    Mutant("new requests on engines with old weights", ASYNC,
           "for engine, served in enumerate(coordinator.fleet.served) if served == coordinator.version]",
           "for engine, _ in enumerate(coordinator.fleet.served)]"),
    Mutant("the composer is not asked", ASYNC,
           "return [Train(coordinator.step + 1, chosen)]",
           "return [Train(coordinator.step + 1, tuple(candidates[:needed]))]"),
    Mutant("the composer's seed", ASYNC, "seed=self.seed,", "seed=0,"),
    Mutant("staleness without the KL", ASYNC, 'metrics.get("staleness/kl", 0.0)', "0.0"),
    Mutant("staleness without the variance", ASYNC, 'metrics.get("staleness/variance", 0.0)', "0.0"),
    Mutant("staleness without the gap", ASYNC, 'metrics.get("staleness/lag_mean", 0.0)', "0.0"),
    Mutant("staleness that is no number counts as none", ASYNC, "else 1.0", "else 0.0"),
    # --- april -------------------------------------------------------------------------------------
    Mutant("no prompts in excess", APRIL, "math.ceil(self.oversample * needed)", "needed"),
    Mutant("what is begun begins anew", APRIL, "keep=lambda entry: entry.born >= oldest", "keep=lambda entry: False"),
    Mutant("what is too old goes on", APRIL, "keep=lambda entry: entry.born >= oldest", "keep=lambda entry: True"),
    Mutant("what is just not too old begins anew", APRIL,
           "keep=lambda entry: entry.born >= oldest", "keep=lambda entry: entry.born > oldest"),
    Mutant("what runs is thrown away", APRIL, "park = [entry.park(keep=True)", "park = [entry.park()"),
    Mutant("nobody waits for what becomes too old", APRIL,
           "return any(entry.born <= oldest for", "return any(entry.born < oldest for"),
    Mutant("newest groups first", APRIL,
           "key=_oldest_first)[: needed - training]", "key=_oldest_first)[-(needed - training) :]"),
    Mutant("longest first", APRIL,
           "key=lambda entry: (_left(coordinator, entry), entry.prompt.draw))",
           "key=lambda entry: (-_left(coordinator, entry), entry.prompt.draw))"),
    Mutant("the round waits for everything", APRIL, "if running and (enough < needed or", "if running and (True or"),
    Mutant("early gradients of what may be displaced", APRIL,
           "first = entries[: coordinator.settings.prompts_per_step]", "first = entries"),
    # --- rounds, synchronous -----------------------------------------------------------------------
    Mutant("half of a step's prompts", ROUNDS,
           "missing = settings.prompts_per_step - ledger.live",
           "missing = max(settings.prompts_per_step // 2, 1) - ledger.live"),
    Mutant("a deferred prompt begins anew on its new engine", ROUNDS,
           "if entry.need == size}", "if entry.need != size}"),
    Mutant("a stop waits for groups that may never come", ROUNDS,
           "if not self._in_round(coordinator) or self._given_up(coordinator):", "if not self._in_round(coordinator):"),
    Mutant("a lost prompt goes where it was lost", ROUNDS, "avoid=entry.engine)]", "avoid=-1)]"),
    Mutant("given up one attempt early", ROUNDS,
           "if entry.failures < coordinator", "if entry.failures + 1 < coordinator"),
    Mutant("new weights only at the next round but one", ROUNDS,
           "if coordinator.served != coordinator.version:\n", "if coordinator.served < coordinator.version - 1:\n"),
    Mutant("temperatures of schedules ignored", ROUNDS,
           'n, need, coordinator.scheduled("temperature", None, entry.prompt)', "n, need, None"),
    Mutant("another temperature in the middle of a group", ROUNDS,
           "entry.need, first.temperature", 'entry.need, coordinator.scheduled("temperature", None, entry.prompt)'),
    Mutant("engines keep their degree", ROUNDS, "else planner.degree\n", "else 0\n"),
    Mutant("lent engines are not woken", ROUNDS, "if lent := coordinator.fleet.lent:", "if lent := set():"),
    Mutant("everything on the first engine", FLEET, "return loads.index(min(loads))", "return 0"),
    Mutant("the busiest engine", FLEET, "return loads.index(min(loads))", "return loads.index(max(loads))"),
    Mutant("an engine's version is the fleet's newest", MACHINE,
           "ledger.generate(request, self.fleet.served[request.engine])",
           "ledger.generate(request, self.fleet.newest)"),
    Mutant("evaluations one step late", MACHINE,
           "if not full and not (every and self.step % every == 0):",
           "if not full and not (every and self.step % every == 1 % every):"),
    Mutant("no checkpoint but the last", MACHINE, "or (every and self.step and self.step % every == 0)", ""),
    Mutant("progress of a run one step short", MACHINE,
           "self.step / max(self.settings.steps - 1, 1)", "self.step / max(self.settings.steps, 1)"),
    Mutant("surplus responses run on", LEDGER,
           "if entry.stage is PromptStage.RUNNING:\n                ids",
           "if entry.stage is PromptStage.LOST:\n                ids"),
    # --- composer ----------------------------------------------------------------------------------
    Mutant("urgent groups wait", ASYNC, "[: min(urgent, count)]", "[:0]"),
    Mutant("prompts are no work", ROUNDS, " + coordinator.work_of(entry.prompt)", ""),
    Mutant("freshest first", ASYNC, "ranking.sort(key=lambda i: -ages[i])", "ranking.sort(key=lambda i: ages[i])"),
    Mutant("hard ones first", ASYNC,
           "key=lambda i: difficulty(ordered[i])", "key=lambda i: -difficulty(ordered[i])"),
    Mutant("curriculum backwards", ASYNC,
           "chance = 1 - min(max(progress, 0.0), 1.0)", "chance = min(max(progress, 0.0), 1.0)"),
    Mutant("strata without media", ASYNC, "frozenset(media.kind for media in g.prompt.media)", "None"),
    # --- training before a round is over -----------------------------------------------------------
    Mutant("engines are never lent", EARLY, "if not self.first <= progress <= self.last or", "if True or"),
    Mutant("engines are lent at any time", EARLY,
           "if not self.first <= progress <= self.last or", "if not progress or"),
    Mutant("all engines but one are lent", EARLY, "[: len(fleet) // 2]", "[: len(fleet) - 1]"),
    Mutant("the busiest engines are lent", EARLY, "(fleet.load[engine], -engine)", "(-fleet.load[engine], -engine)"),
    Mutant("caches of the others don't matter", EARLY, "projected_tokens(coordinator) > capacity", "False"),
    Mutant("lent engines do nothing", EARLY, "if len(ready) < chunk:", "if True:"),
    Mutant("larger portions", EARLY, "for entry in ready[:chunk])", "for entry in ready)"),
    Mutant("training early without confidence", EARLY, "< self.confidence:", "< 0:"),
    Mutant("never early", EARLY, "< self.confidence:", "< 2:"),
    Mutant("one group at a time", EARLY,
           "entry.group() for entry in ready)", "entry.group() for entry in ready[:1])"),
    Mutant("the unlikeliest count", EARLY,
           "for entry in ledger.at(PromptStage.RUNNING)), reverse=True)",
           "for entry in ledger.at(PromptStage.RUNNING)))"),
    Mutant("one response of a group is enough", EARLY, "[: entry.need - len(entry.responses)]", "[:1]"),
    Mutant("pace of the first response for ever", FLEET,
           "if now > began and tokens > before:", "if now > began and tokens > before and not self.growth:"),
    Mutant("prompts are no work for the trainer", FLEET, "sum(g.prompt.tokens + sum(", "sum(sum("),
    Mutant("the planner never doubles", FLEET, "wanted *= 2", "wanted *= 1"),
    Mutant("calm is never over", FLEET, "self._calm = 0 if preemptions else", "self._calm = 0 if False else"),
    # --- turns -------------------------------------------------------------------------------------
    Mutant("an ended turn is scored", LEDGER,
           "elif entry.prompt.environment and response.finish == STOPPED:", "elif False:"),
    Mutant("the end of an earlier turn ends this one", LEDGER,
           "response.num_tokens < entry.before(sample)", "False"),
    Mutant("a failed environment loses nothing", LEDGER,
           "        self._lose(entry, reason)\n        return True", "        return True"),
    Mutant("parked between turns and lost", LEDGER, "entry.begun |= entry.between_turns()", "pass"),
    Mutant("an observation ends the response", LEDGER, "        if done:\n", "        if True:\n"),
    Mutant("no next turn", ROUNDS, "        if ledger.unturned:\n", "        if False:\n"),
    Mutant("turns weigh nothing on engines", FLEET,
           "self.running[engine] += 1\n\n    def end_sample", "pass\n\n    def end_sample"),
    Mutant("media of observations in another order", EPISODES,
           "media=(*response.media, *observed.media),", "media=(*observed.media, *response.media),"),
    Mutant("a turn is tokenised again", EPISODES,
           "token_ids=(*response.token_ids, *observation.token_ids_T.tolist()),",
           "token_ids=(*response.token_ids[: -len(turn_ids)], *(\n                "
           "[*self.observations.processor.encode(self._text(turn_ids)), *turn_ids][: len(turn_ids)]\n            "
           "), *observation.token_ids_T.tolist()),"),
    Mutant("an environment that is begun anew is believed", EPISODES,
           "if answer.done or answer.media != media or again.token_ids_T.tolist() != list(seen):", "if False:"),
    # --- contexts that are rewritten ---------------------------------------------------------------
    Mutant("one medium more than the context shows", VIEWS,
           "np.maximum(seen_T - int(found[1]), 0)", "np.maximum(seen_T - int(found[1]) - 1, 0)"),
    Mutant("what a turn saw begins behind its observation", VIEWS, "kept_T = np.arange(end) >= first - 1",
           "kept_T = np.arange(end) >= np.flatnonzero(versions_T[:end] != ENVIRONMENT)[-1]"),
    Mutant("history is trained on again", COMPOSER,
           "versions = np.where(kept < first, ENVIRONMENT, versions_T[kept])", "versions = versions_T[kept]"),
    Mutant("positions of a rewritten context go on from the record", INPUTS,
           "np.repeat(ends - advances - where[firsts], lengths)", "np.repeat(0 * ends, lengths)"),
    Mutant("a rewritten context shows the first media", INPUTS,
           "vision = cut(inputs.vision, first * merge_unit, end * merge_unit)",
           "vision = cut(inputs.vision, 0, (end - first) * merge_unit)"),
    # --- schedules ---------------------------------------------------------------------------------
    Mutant("phases begin late", SCHEDULES,
           "bisect.bisect_right(self.starts, progress)", "bisect.bisect_left(self.starts, progress)"),
    Mutant("success and failure exchanged", SCHEDULES,
           "(1 - share) * self.none + share * self.all", "share * self.none + (1 - share) * self.all"),
    Mutant("a new prompt counts like none", SCHEDULES, "self._sources.get(prompt.source, share))", "share)"),
    Mutant("one schedule for all sources", SCHEDULES,
           "self.schedules.get(source) or self.schedules.get(OTHERS)", "next(iter(self.schedules.values()))"),
    Mutant("controllers learn nothing", SCHEDULES,
           "if self.metric in metrics:", "if self.metric not in metrics and False:"),
    # --- rewards, simulated and real ---------------------------------------------------------------
    Mutant("sandboxes may run for long", REWARDS, "LEAST, RELAXED = 2.0, 1.5", "LEAST, RELAXED = 2.0, 3.0"),
    Mutant("judges are not on every GPU", REWARDS, "settings.gpus if self.scheduled else settings", "settings"),
    Mutant("wrong code is an anchor", REWARDS, "if reward.correct and sandbox:", "if sandbox:"),
    Mutant("code may take five times its anchor", CODE, "factor: float = 2.0", "factor: float = 5.0"),
]
# fmt: on
