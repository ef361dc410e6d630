"""What techniques are built from: the parts that need torch when they are imported.

Techniques, the configuration and the engine's front can be imported where torch is absent, to validate and to explain;
they import from here inside their functions.
"""
