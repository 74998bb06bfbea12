# Math-specific reward function
def math_reward_func(prompts, completions, task, final, **kwargs):
    rewards = []
    for prompt, completion, t, answer in zip(prompts, completions, task, final):
        if t == "math":
            # Calculate math-specific reward
            rewards.append(1.0 if completion.endswith(f"#### {answer}") else 0.0)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards


# Coding-specific reward function
def coding_reward_func(prompts, completions, task, **kwargs):
    return [float("def " in completion) if t == "coding" else None for completion, t in zip(completions, task)]
