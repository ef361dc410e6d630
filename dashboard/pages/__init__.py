"""The pages of a run: each a function from a :class:`~trine.dashboard.view.View` to components."""
