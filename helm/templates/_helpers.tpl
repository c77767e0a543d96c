{{/* Names are cut to what a label may hold, less the longest suffix that a template adds. */}}
{{- define "medusa-gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "medusa-gateway.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "medusa-gateway.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "medusa-gateway.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What selects a component's pods. Never changes in a release's life. Takes (list $ "component"). */}}
{{- define "medusa-gateway.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/name: {{ include "medusa-gateway.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "medusa-gateway.labels" -}}
{{- $root := first . -}}
{{ include "medusa-gateway.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
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
