// Why a rollout was kept or dropped, in a sentence, from the record of the selection.

import { figure, times } from "./dom.js";

const penalty = (one) => one.p_err + one.p_format;

export function why(step, group, siblings, one) {
  if (one.verdict === "unknown") return "Its reward is unknown, because the service failed. It does not count as wrong.";
  if (one.verdict === "equal") {
    return `All rewards of this group are equal (${group.positive ? "all correct" : "all wrong"}), so there is nothing to compare: the group was rejected.`;
  }
  if (step.rule === "all") return "This arm trains on all rollouts of a group with different rewards.";
  const correct = one.reward > 0;
  const [kept, all] = correct ? [group.kept_positive, group.positive] : [group.kept_negative, group.negative];
  const kind = correct ? "correct" : "wrong";
  if (kept === all) return `All ${all} ${kind} rollouts of this group were kept.`;
  const counts = `${kept} of ${times(all, `${kind} rollout`)} of this group were kept`;
  if (!correct || step.rule === "uniform") return `${counts}, drawn at random with equal chances.`;
  const others = siblings.filter((other) => other.reward > 0).map(penalty);
  if (step.rule === "topk") return `${counts}: those with the lowest penalty. Its penalty is ${sum(one)}.`;
  const weight = (value) => figure(1 / (value + step.eps));
  return `${counts}, drawn with weights 1 / (penalty + ${step.eps}). Its penalty is ${sum(one)}, its weight ${weight(penalty(one))}; ` +
    `the weights of the group's correct rollouts go from ${weight(Math.max(...others))} to ${weight(Math.min(...others))}.`;
}

const sum = (one) => `${figure(one.p_err)} (tool errors) + ${figure(one.p_format)} (format) = ${figure(penalty(one))}`;
