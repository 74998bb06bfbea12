import asyncio
import re


async def _judge(completion, answer):
    await asyncio.sleep(0)
    found = re.findall(r"#### (-?[0-9.,]+)", completion)
    return float(bool(found) and found[-1].replace(",", "") == answer)


async def async_reward_func(prompts, completions, answer, **kwargs):
    return await asyncio.gather(*(_judge(c, a) for c, a in zip(completions, answer)))
