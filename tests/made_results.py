"""Results of claims as the harness keeps them, made up for tests."""

from benchmarks.claims.pairs import FIVE
from benchmarks.claims.verdicts import judge_all
from pptp.intervals import Estimate


def estimate(value, width=0.01):
    return {"value": value, "low": value - width, "high": value + width}


def model(accuracy, auc, **more):
    return {
        "train_accuracy": estimate(0.9),
        "test_accuracy": estimate(accuracy),
        "attacks": {a: {"auc": estimate(auc if a == "confidence" else 0.5)} for a in FIVE},
        "strongest": {"attack": "confidence", "auc": estimate(auc), "tpr@0.01": estimate(0.02)},
        "references": "one",
        "cost": {"seconds": 10.0},
        **more,
    }


def distance(value, width=0.01):
    auc = {**estimate(value, width), "note": ""}
    return {"auc": auc, "effect": list(Estimate(**auc).effect)}


def stage(name, rms, verdict, cosine=None, **more):
    distances = {"rms": distance(rms), "cosine": distance(rms if cosine is None else cosine)}
    return {"name": name, "distances": distances, "verdict": verdict, "by_member_gap": "safe", **more}


def found(where="layer4", train=1.0, models=None, last=0.7):
    names = ["layer3", "layer4"]
    stages = [stage(n, last if n >= where else 0.5, "risky" if n >= where else "safe") for n in names]
    risk = {
        "stages": [*stages, stage("head", 0.9, "risky")],
        "train_accuracy": {"full": estimate(1.0), "half": estimate(train)},
        "stall": "layer4",
        "powered": train >= 0.95,
    }
    return {"risk": risk, "models": {"undefended": model(0.4, 0.9), **(models or {})}}


def said(results, start):
    return next((v.agrees for v in judge_all(results) if v.claim.startswith(start)), None)
