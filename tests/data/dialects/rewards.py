"""Rewards by five conventions: how many letters of the last word of a response are right, above 0 for any word."""

import re


def letters(text, word):
    said = (re.findall(r"[A-Za-z0-9+/]+", text) or [""])[-1]
    return (1 + sum(map(str.__eq__, said, word))) / (1 + max(len(word), len(said)))


def own(response, answer):
    return letters(response, answer)


def trl(prompts, completions, solution, **kwargs):
    words = [re.findall(r"\\boxed{(.*)}", text)[-1] for text in solution]
    return [letters(completion[0]["content"], word) for completion, word in zip(completions, words)]


def trl_text(completions, ground_truth, **kwargs):
    return [letters(completion, word) for completion, word in zip(completions, ground_truth)]


def tunix(prompts, completions, question, answer, **kwargs):
    assert all(text in prompt for text, prompt in zip(question, prompts)), (question, prompts)
    return [letters(completion, word) for completion, word in zip(completions, answer)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "made/words" and extra_info["split"] == "train"
    return letters(solution_str, ground_truth)


def openai(sample, item):
    return letters(sample["output_text"], item["reference_answer"])
