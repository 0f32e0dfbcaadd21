#!/bin/sh
# Writes the federation file, certificates and made-up data, one folder per site. Needs holdfast and holdfast-deploy on this machine.
set -eu
cd "$(dirname "$0")"
rm -rf sites federation.toml federation.toml.sig certs
holdfast federation new --nodes north=north:7000,south=south:7000,west=west:7000 --topology ring \
    --algorithm local-gecl --input-shape 64 --classes 10 --rounds 20 algorithm.lr=0.1 algorithm.local_steps=4
holdfast federation certs federation.toml
holdfast federation show federation.toml | sed -n 's/^Fingerprint of the file: /FINGERPRINT=/p' > .env
python3 - <<'PYTHON'
import numpy as np
import torch
from sklearn.datasets import load_digits

import holdfast as hf

x, y = load_digits(return_X_y=True)
data = hf.partition(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y), hf.Dirichlet(0.3), nodes=3, seed=0)
for number, name in enumerate(("north", "south", "west")):
    inputs, labels = data.node(number)
    np.savez(f"{name}.npz", x_train=inputs.numpy(), y_train=labels.numpy())
PYTHON
for name in north south west; do
    mkdir -p "sites/$name/certs"
    cp federation.toml federation.toml.sig "sites/$name/"
    cp certs/ca.crt "certs/$name.crt" "certs/$name.key" "sites/$name/certs/"
    mv "$name.npz" "sites/$name/data.npz"
done
chmod -R go-rwx sites
if [ "$(id -u)" = 0 ]; then chown -R 10001 sites; else echo "give the folders to the containers' user: sudo chown -R 10001 sites"; fi
echo "next: docker compose up --build"
