"""One thread for torch: on two cores its threads and XLA's wait for each other, at thirty times the cost of the work."""

import torch

torch.set_num_threads(1)
