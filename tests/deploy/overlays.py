"""Where the manifests are, and which overlays they offer."""

from tests.deploy import manifest_checks as checks

KUBERNETES = checks.ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "production", "single-node")
