{{/* Names are cut to what a label may hold, less the longest suffix that a template adds. */}}
{{- define "medusa-gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimAll "-" }}
{{- end }}

{{/* A Service's name starts with a letter and has no dots, which a release's name may: so the chart's name comes first there. */}}
{{- define "medusa-gateway.fullname" -}}
{{- $name := include "medusa-gateway.name" . -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- $full := default (ternary $release (printf "%s-%s" $release $name) (contains $name $release)) .Values.fullnameOverride -}}
{{- if and (not .Values.fullnameOverride) (regexMatch "^[0-9]" $full) }}{{ $full = printf "%s-%s" $name $release }}{{ end -}}
{{- $full | trunc 50 | trimAll "-" }}
{{- end }}

{{/* What selects a component's pods. Never changes in a release's life. Takes (list $ "component"). */}}
{{- define "medusa-gateway.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/name: {{ include "medusa-gateway.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- end }}

{{/* The chart's own labels. Takes (list $ "component"). */}}
{{- define "medusa-gateway.ownLabels" -}}
{{- $root := first . -}}
{{ include "medusa-gateway.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- end }}

{{/* Those and the operator's, each key once: a resource's own labels count over commonLabels. Takes (list $ "component" [its labels]). */}}
{{- define "medusa-gateway.labels" -}}
{{- $root := first . -}}
{{ include "medusa-gateway.ownLabels" . }}
{{- $labels := dict }}
{{- range append (list $root.Values.commonLabels) (ternary (last .) dict (gt (len .) 2)) }}
{{- range $key, $value := . }}{{ $_ := set $labels $key $value }}{{ end }}
{{- end }}
{{- with $labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "medusa-gateway.serviceAccountName" -}}
{{- default (ternary (include "medusa-gateway.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{/* Takes an image value and the tag to use when it names none. */}}
{{- define "medusa-gateway.imageReference" -}}
{{- $image := first . -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ default (last .) $image.tag }}
{{- end }}
{{- end }}

{{- define "medusa-gateway.image" -}}
{{- $tag := ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion .Values.gpu.enabled }}
{{- include "medusa-gateway.imageReference" (list .Values.image $tag) }}
{{- end }}

{{/* Container settings of the "restricted" Pod Security Standard, and a read-only root beside. */}}
{{- define "medusa-gateway.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Takes a map of user and group ids; those that are null are left to the cluster. */}}
{{- define "medusa-gateway.podSecurityContext" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }}: {{ $value | int64 }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{/* Whether the cache is a claim that one node, or one pod, may mount at a time. */}}
{{- define "medusa-gateway.cacheHasOneWriter" -}}
{{- if and (eq .Values.cache.type "persistentVolumeClaim") (hasPrefix "ReadWriteOnce" .Values.cache.accessMode) }}true{{ end }}
{{- end }}

{{/* A new pod first, then the old one goes; the other way round where both could not have the cache's volume. */}}
{{- define "medusa-gateway.rollout" -}}
{{- $surge := .Values.rollout.maxSurge -}}
{{- $unavailable := .Values.rollout.maxUnavailable -}}
{{- if kindIs "invalid" $surge }}{{ $surge = ternary 0 1 (ne (include "medusa-gateway.cacheHasOneWriter" .) "") }}{{ end -}}
{{- if kindIs "invalid" $unavailable }}{{ $unavailable = ternary 1 0 (has (toString $surge) (list "0" "0%")) }}{{ end -}}
maxSurge: {{ $surge }}
maxUnavailable: {{ $unavailable }}
{{- end }}

{{/* The most pods that there may be. */}}
{{- define "medusa-gateway.mostPods" -}}
{{- ternary .Values.autoscaling.maxReplicas .Values.replicaCount .Values.autoscaling.enabled | int }}
{{- end }}

{{/* How long a pod may take to be ready before a rollout counts as failed: the old one's end, the download, the start, and a minute. */}}
{{- define "medusa-gateway.progressDeadline" -}}
{{- $start := mul .Values.probes.startup.periodSeconds .Values.probes.startup.failureThreshold -}}
{{- add (include "medusa-gateway.gracePeriod" .) (ternary .Values.model.fetchSeconds 0 .Values.model.fetch) $start 60 }}
{{- end }}

{{/* Everything that the gateway writes lies in /cache or /tmp. */}}
{{- define "medusa-gateway.cacheEnv" -}}
- {name: HOME, value: /cache}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: XDG_STATE_HOME, value: /cache/state}
{{- end }}

{{- define "medusa-gateway.modelMounts" -}}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if include "medusa-gateway.hasModelVolume" . }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if include "medusa-gateway.backendsConfigMap" . }}
- {name: backends, mountPath: /etc/medusa-gateway/backends, readOnly: true}
{{- end }}
{{- end }}

{{- define "medusa-gateway.hasModelVolume" -}}
{{- with .Values.model.volume }}{{ if or .existingClaim .hostPath }}true{{ end }}{{ end }}
{{- end }}

{{/* The chart's variables and extraEnv, each name once: the operator's own count. Takes (list $ "the chart's as YAML"). */}}
{{- define "medusa-gateway.env" -}}
{{- $extra := (first .).Values.extraEnv -}}
{{- $names := list -}}
{{- range $extra }}{{ $names = append $names .name }}{{ end -}}
{{- $env := list -}}
{{- range last . | fromYamlArray }}{{ if not (has .name $names) }}{{ $env = append $env . }}{{ end }}{{ end -}}
{{- toYaml (concat $env $extra) }}
{{- end }}

{{/* --model and --heads, or --backends, as `serve` and `fetch` take them. */}}
{{- define "medusa-gateway.modelArgs" -}}
{{- if include "medusa-gateway.backendsConfigMap" . }}
- --backends=/etc/medusa-gateway/backends/backends.yaml
{{- end }}
{{- with .Values.model.name }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
{{- with .Values.model.heads }}
- {{ printf "--heads=%s" . | quote }}
{{- end }}
{{- end }}

{{- define "medusa-gateway.keysSecret" -}}
{{- ternary .Values.auth.secret.name (printf "%s-api-keys" (include "medusa-gateway.fullname" .)) (eq .Values.auth.mode "secret") }}
{{- end }}

{{- define "medusa-gateway.keysFile" -}}
{{- ternary .Values.auth.secret.key "keys.yaml" (eq .Values.auth.mode "secret") }}
{{- end }}

{{/* Empty: one engine, which model describes. */}}
{{- define "medusa-gateway.backendsConfigMap" -}}
{{- if .Values.backends.existingConfigMap }}{{ .Values.backends.existingConfigMap }}
{{- else if .Values.backends.content }}{{ include "medusa-gateway.fullname" . }}-backends
{{- end }}
{{- end }}

{{- define "medusa-gateway.policyConfigMap" -}}
{{- default (printf "%s-policy" (include "medusa-gateway.fullname" .)) .Values.policy.existingConfigMap }}
{{- end }}

{{/* The pod's grace: the pause before SIGTERM, the drain, and what the server takes to unwind and to export. */}}
{{- define "medusa-gateway.gracePeriod" -}}
{{- add .Values.drain.preStopSeconds (ceil .Values.drain.timeoutSeconds) 20 }}
{{- end }}

{{/* Whether model or heads may be hub ids rather than folders. */}}
{{- define "medusa-gateway.usesHub" -}}
{{- include "medusa-gateway.backendsConfigMap" . }}
{{- range list .Values.model.name .Values.model.heads }}
{{- if and . (not (hasPrefix "/" .)) }}true{{ end }}
{{- end }}
{{- end }}
