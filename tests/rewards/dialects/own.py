import re


def grade(response, answer):
    found = re.findall(r"#### (-?[0-9.,]+)", response)
    return bool(found) and found[-1].replace(",", "") == answer
