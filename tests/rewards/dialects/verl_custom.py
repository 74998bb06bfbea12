import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    pred = found[-1].replace(",", "") if found else None
    return {"score": 1.0 if pred == ground_truth else 0.0, "pred": pred, "split": (extra_info or {}).get("split")}
