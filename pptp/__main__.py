"""`python -m pptp` is `pptp`."""

from .cli import main

raise SystemExit(main())
