"""What kube-controller-manager and kube-scheduler do for us in a cluster, as far as the product relies on it."""
