"""One module per verb. Each has ``SUMMARY``, ``prepare_parser(parser)`` and ``run(arguments) -> exit code``."""
