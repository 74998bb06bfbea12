"""One thread for torch: on two cores its threads and those of XLA hinder each other, at thirty times the cost."""

import torch

torch.set_num_threads(1)
