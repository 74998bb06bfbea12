import re


def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def accuracy_reward(prompts, completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert all(messages[-1]["role"] == "user" for messages in prompts)
    return [float(re.findall(r"#### (-?[0-9.,]+)|$", c)[0].replace(",", "") == s) for c, s in zip(contents, solution)]
