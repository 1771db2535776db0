"""Files that somebody else may have put there. foreign: images, recipes and weights; folder: the files of a run or an audit."""
