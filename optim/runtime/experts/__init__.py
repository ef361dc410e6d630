"""Mixtures of experts whose experts are spread over ranks: tokens travel to them by all-to-all, and come back."""
