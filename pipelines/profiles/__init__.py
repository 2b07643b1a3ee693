"""Layer profiles that come with AutoDDL (data; read them with :func:`autoddl.pipelines.profile.load_profile`)."""
