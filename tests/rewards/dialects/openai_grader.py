import re


def grade(sample: dict, item: dict) -> float:
    output_text = sample["output_text"]
    found = re.findall(r"#### (-?[0-9.,]+)", output_text)
    return 1.0 if found and found[-1].replace(",", "") == item["reference_answer"] else 0.0
