"""Pipelines: a model in stages on several ranks, and the schedules of ``torch.distributed.pipelining`` that run them."""
