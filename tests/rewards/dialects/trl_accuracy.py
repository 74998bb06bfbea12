import re


def accuracy_reward(completions, ground_truth, **kwargs):
    # Regular expression to capture content after ####
    matches = [re.search(r"#### (-?[0-9.,]+)", completion) for completion in completions]
    contents = [match.group(1).replace(",", "") if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
