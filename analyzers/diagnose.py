"""From numbers to an answer: findings, what the run is not bound by, the checklist, the verdict."""

from __future__ import annotations

from dataclasses import replace

from trine.analyzers.checklist import checklist
from trine.analyzers.findings import Facts, gather, rules
from trine.analyzers.results import Analysis, Finding, NotBound
from trine.analyzers.verdict import verdict

__all__ = ["diagnose"]


def diagnose(analysis: Analysis) -> Analysis:
    """The same analysis with ``findings``, ``not_bound_by``, ``checklist`` and ``verdict`` filled in.

    Faults come first, each kind by the share of the step at stake. A rule that lacks its signal says
    nothing, neither a fault nor a clean bill. Pure: the same analysis gives the same answer.
    """
    facts = gather(analysis)
    findings = _findings(facts)
    return replace(
        analysis,
        findings=findings,
        not_bound_by=_not_bound(facts),
        checklist=checklist(facts, findings),
        verdict=verdict(facts, findings),
    )


def _findings(facts: Facts) -> tuple[Finding, ...]:
    found = [finding for rule in rules() if (finding := rule.find(facts)) is not None]
    return tuple(sorted(found, key=lambda finding: (finding.kind != "fault", -finding.severity, finding.id)))


def _not_bound(facts: Facts) -> tuple[NotBound, ...]:
    statements = [(rule.ID, getattr(rule, "healthy", lambda facts: None)(facts)) for rule in rules()]
    return tuple(NotBound(id, statement) for id, statement in statements if statement is not None)
