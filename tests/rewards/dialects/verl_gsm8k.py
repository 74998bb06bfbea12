import re


def extract_solution(solution_str, method="strict"):
    solutions = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str)
    return solutions[-1].replace(",", "").replace("$", "") if solutions else None


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """The scoring function for GSM8k."""
    answer = extract_solution(solution_str=solution_str, method=method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
