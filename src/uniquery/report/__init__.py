"""Pictures of instances, and one html page about one run or several."""
