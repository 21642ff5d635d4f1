#!/usr/bin/env bash
# Trains the pendulum preset (under a minute), evaluates it, and draws its curve and a video.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
name="demo-$(date +%Y%m%d-%H%M%S)"
.venv/bin/lockstep train pendulum --seed 3 --name "$name"
.venv/bin/lockstep evaluate "runs/$name" --episodes 20
.venv/bin/lockstep plot "runs/$name" --out "runs/$name/curve.png"
.venv/bin/lockstep visualize "runs/$name"
